"""The executor of the CPU: segment by segment, in order, with the lifetimes and bytes that the plan says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from memplan.planning.graph import Graph
from memplan.program.executor import Stages, compile_stages
from memplan.program.extract import extract
from memplan.program.trace import Program, trace
from memplan.running import Runner, segmented_plan
from memplan.verify.plan import judge
from tests.program.steps import CASES, X, by_hand, one_op_segments
from tests.program.test_rewrite import PLANS, chain, program_of
from tests.program.test_trace import assert_same, traced


def staged(program: Program, graph: Graph, *words: str) -> Stages:
    plan = by_hand(graph, *words) if words else one_op_segments(graph)
    judge(plan, graph)
    return compile_stages(program, graph, plan)


@pytest.mark.parametrize("name", CASES)
def test_every_operation_compiled_apart_is_the_step(name: str) -> None:
    case = CASES[name]
    program = traced(case)
    run = Runner(program, None, staged(program, extract(program)))
    expected = jax.jit(case.step, **case.options)(*case.make(), **case.kwargs)
    compiled = jax.jit(case.step, **case.options).lower(*case.make(), **case.kwargs)
    args, kwargs = jax.tree.unflatten(compiled.in_tree, jax.tree.leaves(_dynamic(case)))
    assert_same(expected, run(*args, **kwargs))


def _dynamic(case: Any) -> Any:
    from_static = {"static number": (case.make()[1:], {}), "static last": (case.make()[:1], {})}
    kwargs = {name: value for name, value in case.kwargs.items() if name not in ("n", "on")}
    return next((found for step, found in from_static.items() if case is CASES[step]), (case.make(), kwargs))


@pytest.mark.parametrize("words", PLANS.values(), ids=PLANS)
def test_a_plan_by_hand_is_the_step(words: tuple[str, ...]) -> None:
    program, graph = program_of(chain, jnp.asarray(X))
    (found,) = staged(program, graph, *words)([jnp.asarray(X)])
    np.testing.assert_allclose(found, chain(jnp.asarray(X)), rtol=1e-6)


def test_the_peak_is_what_a_pencil_says() -> None:
    # Values of 4000 bytes: x -> sin 1 -> cos 2 -> tanh 3 -> mul 4 -> sum 5 (4 bytes). x is not donated and stays.
    program, graph = program_of(chain, jnp.ones(1000))
    kept = staged(program, graph).peak_by_segment
    assert kept[:4] == (8000, 12000, 16000, 20000)
    words = "compute 0, |, compute 1, |, compute 2, free 2, |, compute 3, free 1, free 3, |, compute 4"
    freed = staged(program, graph, *words.split(", "))
    # tanh may write over cos, mul over tanh: the buffers of values that end are given to what is made.
    assert freed.peak_by_segment[:4] == (8000, 12000, 12000, 12000)
    assert freed.peak_nbytes == max(freed.peak_by_segment)


def test_a_recomputed_value_is_not_there_in_between() -> None:
    program, graph = program_of(chain, jnp.ones(1000))
    stages = staged(program, graph, *PLANS["recompute"])
    assert stages.peak_by_segment[2] == 8000  # x, and tanh over cos; sin is gone


def test_an_offloaded_value_stays_where_it_is() -> None:
    program, graph = program_of(chain, jnp.ones(1000))
    stages = staged(program, graph, *PLANS["offload"])
    assert stages.peak_by_segment[2] == 12000  # host memory and device memory are the same


def update(state: jax.Array, gradient: jax.Array) -> Any:
    return state - 0.1 * gradient, (state * gradient).sum()


def test_donated_buffers_are_consumed_like_by_jit() -> None:
    for run in (jax.jit(update, donate_argnums=0), _runner(update, 0)):
        state, gradient = jnp.ones(1000), jnp.ones(1000)
        new, _ = run(state, gradient)
        assert state.is_deleted()
        assert not gradient.is_deleted()
        np.testing.assert_allclose(new, 0.9)


def test_a_donated_buffer_ends_where_it_is_read_last() -> None:
    def step(state: jax.Array) -> jax.Array:
        return jnp.stack([jnp.sin(state).sum(), jnp.cos(state).sum()])

    run, state = _runner(step, 0), jnp.ones(1000)
    run(state)
    assert state.is_deleted()  # no output takes its buffer; it is gone all the same


def test_an_argument_that_is_not_donated_is_left_alone() -> None:
    run, state = _runner(update), jnp.ones(1000)
    run(state, state)
    run(state, state)
    assert not state.is_deleted()


def _runner(step: Callable[..., Any], donated: int | tuple[int, ...] = ()) -> Runner:
    count = step.__code__.co_argcount
    program = trace(step, (jnp.ones(1000),) * count, {}, {"donate_argnums": donated})
    return Runner(program, None, staged(program, extract(program)))


def test_equal_segments_share_an_executable() -> None:
    def step(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.sin(x) + 1
        return x

    program, graph = program_of(step, jnp.ones(8))
    words = [word for op in range(0, 8, 2) for word in (f"compute {op}", f"compute {op + 1}", f"free {op + 1}", "|")]
    stages = staged(program, graph, *words)
    assert len({id(stage.run) for stage in stages.stages}) == 1


def test_loops_are_not_taken_for_equal_by_their_print() -> None:
    def step(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x)
        return x

    program, graph = program_of(step, jnp.ones(8))
    stages = staged(program, graph).stages
    assert len({id(stage.run) for stage in stages}) == len(stages)


def noisy(log: list[str]) -> Callable[[jax.Array], Any]:
    """Effects of every kind between operations; the first is slow, so that a later one could overtake it."""

    def note(name: str, seconds: float = 0.0) -> Callable[..., np.float32]:
        def write(*_: Any) -> np.float32:
            time.sleep(seconds)
            log.append(name)
            return np.float32(len(log))

        return write

    def step(x: jax.Array) -> Any:
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        first = io_callback(note("slow", 0.05), scalar, x, ordered=True)
        y = jnp.sin(x)
        io_callback(note("result unused"), scalar, y, ordered=True)

        def body(carry: jax.Array, _: Any) -> Any:
            io_callback(note("in scan"), scalar, carry, ordered=True)
            return jnp.cos(carry), None

        z, _ = jax.lax.scan(body, y, length=2)
        branch = jax.lax.cond(
            z.sum() > -100,
            lambda v: io_callback(note("in cond"), scalar, v, ordered=True),
            lambda v: io_callback(note("not this"), scalar, v, ordered=True),
            z,
        )
        io_callback(note("unordered"), scalar, z, ordered=False)
        pure = jax.pure_callback(note("pure"), scalar, z)
        inner = jax.jit(lambda v: io_callback(note("in jit"), scalar, v, ordered=True))(z)
        return first, branch, pure, inner, jnp.tanh(z)

    return step


ORDERED = ["slow", "result unused", "in scan", "in scan", "in cond", "in jit"]


@pytest.mark.parametrize("segments", ["one op each", "as planned"])
def test_effects_run_once_and_in_order_across_segments(segments: str) -> None:
    log: list[str] = []
    program, graph = program_of(noisy(log), jnp.asarray(X))
    plan = one_op_segments(graph) if segments == "one op each" else segmented_plan(graph, 10**5, "cpu")
    judge(plan, graph)
    stages = compile_stages(program, graph, plan)
    for _ in range(3):
        log.clear()
        jax.block_until_ready(stages([jnp.asarray(X)]))
        jax.effects_barrier()
        assert [name for name in log if name in ORDERED] == ORDERED
        assert sorted(log) == sorted([*ORDERED, "unordered", "pure"])


def test_debug_prints_come_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("one {}", 1.0, ordered=True)
        y = jnp.sin(x).sum()
        jax.debug.print("two {y:.1f}", y=y, ordered=True)
        jax.debug.print("three", ordered=True)
        return y

    program, graph = program_of(step, jnp.zeros(3))
    staged(program, graph)([jnp.zeros(3)])
    jax.effects_barrier()
    printed = [line for line in capfd.readouterr().out.splitlines() if line]
    assert printed == ["one 1.0", "two 0.0", "three"]


def test_a_failing_callback_fails_the_step() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("the callback says no")

    def step(x: jax.Array) -> jax.Array:
        return jax.pure_callback(fail, x, jnp.sin(x)) + 1

    program, graph = program_of(step, jnp.asarray(X))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the callback says no"):
        jax.block_until_ready(staged(program, graph)([jnp.asarray(X)]))


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    run = _runner(update, 0)
    state = jnp.ones(1000)
    for wrong in ((state,), (state, jnp.ones(999)), (state, jnp.ones(1000, jnp.bfloat16)), ({"a": state}, state)):
        with pytest.raises(TypeError):
            run(*wrong)
    assert not state.is_deleted()
