"""The largest size of a growing network by each method, and memplan.largest against every size."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import memplan
from experiments.bench.cases import Case, Growth
from experiments.bench.results import Measurement
from memplan import api, pipeline
from memplan.compilation.outcome import Outcome
from memplan.errors import InfeasibleBudgetError
from memplan.request import Request, target_of
from memplan.results.infeasible import floor_of
from memplan.studies.baselines import Baseline, Baselines
from memplan.studies.largest import last_fitting
from memplan.units import parse_bytes, show_bytes

_OPTIONS = {"donate_argnums": 0}


@dataclass(frozen=True)
class Compiled:
    """One program: bytes by the compiler, seconds by the replay, and why it does not fit if so."""

    device_bytes: int
    host_bytes: int
    step_s: float
    refused: str


def largest_by_method(case: Case) -> Measurement:
    """Compile ever larger sizes, then bisect. One row, without a size if none fits."""
    growth: Growth = case.facts["growth"]
    tried: dict[int, list[Compiled]] = {}

    def fits(position: int) -> bool:
        if position not in tried:
            tried[position] = list(compiled(case, growth.sizes[position]))
        return any(not program.refused for program in tried[position])

    last = last_fitting(count_to_try(len(growth.sizes), fits), fits)
    limit = tried[last + 1][-1].refused if last + 1 in tried else ""
    row = {"limit": limit, "compilations": sum(map(len, tried.values()))}
    if last < 0:
        return Measurement([row])
    fitting = next(fitting for fitting in tried[last] if not fitting.refused)
    figures = {
        "compiled_bytes": fitting.device_bytes,
        "host_bytes": fitting.host_bytes,
        "step_s": fitting.step_s,
    }
    return Measurement([{"size": growth.sizes[last], **figures, **row}])


def count_to_try(count: int, fits: Callable[[int], bool]) -> int:
    """How many sizes to search: doubles until the last does not fit; large ones take hours."""
    few = 1
    while few < count and fits(few - 1):
        few *= 2
    return min(few, count)


def compiled(case: Case, size: int) -> Iterator[Compiled]:
    """Compile a size; for "xla" without, then if needed with, XLA's own rematerialization."""
    method, budget = case.facts["way"], parse_bytes(str(case.budget), 0)
    step, args = case.make(size, method == "jax.checkpoint")
    if method == "memplan":
        request = Request(case.budget, case.host_budget, case.device)
        outcome = pipeline.best(step, args, {}, _OPTIONS, request)
        yield Compiled(
            outcome.device_bytes,
            outcome.host_bytes,
            outcome.step_s,
            "" if outcome.fits else _limit(outcome),
        )
        return
    baselines = Baselines(step, args, _OPTIONS, target_of(case.device))
    plain = baselines.plain()
    yield _within(plain, budget)
    if method == "xla" and plain.device_bytes > budget:
        yield _within(baselines.xla(plain.resident_bytes, budget), budget)


def _limit(outcome: Outcome) -> str:
    """Why nothing fits: a kernel whose operands exceed the budget, or the smallest plan's bytes."""
    floor, kernel = floor_of(outcome)
    if floor > outcome.limits.device_bytes:
        return f"floor {show_bytes(floor)}, {kernel}"
    if outcome.device_bytes > outcome.limits.device_bytes:
        return f"the next needs {show_bytes(outcome.device_bytes)}"
    return f"the next needs {show_bytes(outcome.host_bytes)} of the host"


def _within(baseline: Baseline, budget: int) -> Compiled:
    refused = (
        ""
        if baseline.device_bytes <= budget
        else f"the next needs {show_bytes(baseline.device_bytes)}"
    )
    return Compiled(baseline.device_bytes, baseline.host_bytes, baseline.step_s, refused)


def against_every_size(case: Case) -> Measurement:
    """`memplan.largest`, then every size in its range planned alone; nothing goes to the host."""
    sizes: range = case.facts["sizes"]
    limits = {"budget": case.budget, "host_budget": 0, "device": case.device}
    start = time.perf_counter()
    frontier = api.frontier(case.make, low=sizes.start, high=sizes[-1], step=sizes.step, **limits)
    between = time.perf_counter()
    fitting = []
    for size in sizes:
        step, args = case.make(size)
        with suppress(InfeasibleBudgetError):
            memplan.jit(step, **limits, donate_argnums=0).plan(*args)
            fitting.append(size)
    return Measurement([{
        "low": sizes.start, "high": sizes[-1], "largest": frontier.largest,
        "of_every_size": max(fitting, default=None),
        "traced": len(frontier.tried), "compilations": frontier.compilations,
        "seconds": between - start, "every_size_s": time.perf_counter() - between,
    }])  # fmt: skip
