"""First and later calls of `memplan.jit` and `jax.jit`, alternating, on the same arguments."""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import memplan
from experiments.bench.cases import Case
from experiments.bench.results import Measurement

FIRST_CALLS, LATER_CALLS = 3, 300


Rounds = list[tuple[float, float]]
"""Pairs of seconds, by `jax.jit` and by `memplan.jit`."""


def measure(case: Case) -> Measurement:
    """Median seconds of the same call by both."""
    rounds = {"first_call": first_calls, "second_start": second_starts, "later_calls": later_calls}[
        case.name
    ](case)
    jax_s, memplan_s = map(statistics.median, zip(*rounds, strict=True))
    return Measurement([{"jax_s": jax_s, "memplan_s": memplan_s}])


def first_calls(case: Case) -> Rounds:
    """First calls (trace, compile, run), each with cleared caches."""
    step, args, _ = case.built()
    return in_turn(memplan.jit, step, args)


def second_starts(case: Case) -> Rounds:
    """First calls of a restarted script, whose executable is in jax's persistent cache."""
    step, args, _ = case.built()
    whole = memplan.jit(step).plan(*args).report.baseline_peak_bytes
    assert whole is not None and isinstance(case.budget, int)
    planned = functools.partial(memplan.jit, budget=whole * case.budget // 100)
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for wrap in (jax.jit, planned):
            first_call(wrap, step, args)
        return in_turn(planned, step, args)


def in_turn(wrap: Callable[..., Any], step: Callable[..., Any], args: Any) -> Rounds:
    return [
        (first_call(jax.jit, step, args), first_call(wrap, step, args)) for _ in range(FIRST_CALLS)
    ]


def first_call(wrap: Callable[..., Any], step: Callable[..., Any], args: Any) -> float:
    jax.clear_caches()
    return call(wrap(lambda state, batch: step(state, batch)), *args)


def call(function: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def later_calls(case: Case) -> Rounds:
    """Calls of a compiled step with many arguments and little work, which is mostly dispatch."""
    state = {f"w{i}": jax.numpy.ones(4) for i in range(200)}

    def step(state: Any) -> Any:
        return {name: value + 1 for name, value in state.items()}

    runs = jax.jit(step), memplan.jit(step)
    for run in runs:
        call(run, state)
    return [(call(runs[0], state), call(runs[1], state)) for _ in range(LATER_CALLS)]
