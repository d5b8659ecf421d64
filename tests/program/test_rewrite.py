"""The rewritten program computes the step, in the order that the plan says, and moves what the plan moves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.errors import PlanMismatchError
from memplan.planning.graph import Graph
from memplan.planning.layout import cut
from memplan.planning.order import early_loose_ends
from memplan.planning.plan import Action, Kind, Plan
from memplan.planning.unfold import Mode, unfold
from memplan.program import compat
from memplan.program.extract import extract
from memplan.program.rewrite import rewrite
from memplan.program.trace import Program, as_step, trace
from memplan.verify.plan import judge
from memplan.verify.program import check_types
from tests.program.steps import CASES, X, by_hand, one_op_segments
from tests.program.test_trace import assert_same, traced, types


def chain(x: Any) -> Any:
    """Ops 0..4 make values 1..5: sin, cos, tanh, mul (of the first and the third), reduce_sum."""
    a = jnp.sin(x)
    c = jnp.tanh(jnp.cos(a))
    return (a * c).sum()


def program_of(step: Any, *args: Any, **options: Any) -> tuple[Program, Graph]:
    program = trace(step, args, {}, options)
    return program, extract(program)


def primitives(closed: compat.ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


@pytest.mark.parametrize("name", CASES)
def test_every_operation_fenced_is_the_step(name: str) -> None:
    case = CASES[name]
    program = traced(case)
    graph = extract(program)
    plan = one_op_segments(graph)
    judge(plan, graph)
    planned = rewrite(program, graph, plan)
    check_types(program.jaxpr, planned)
    expected = jax.jit(case.step, **case.options)(*case.make(), **case.kwargs)
    assert_same(expected, jax.jit(as_step(program, planned), **case.options)(*case.make(), **case.kwargs))


@pytest.mark.parametrize("name", CASES)
def test_weak_types_survive(name: str) -> None:
    program = traced(CASES[name])
    graph = extract(program)
    planned = rewrite(program, graph, one_op_segments(graph))
    before, after = ([compat.aval_of(var) for var in side.jaxpr.outvars] for side in (program.jaxpr, planned))
    assert [aval.weak_type for aval in before] == [aval.weak_type for aval in after]


def attention(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        hidden = x
        for weight in weights:
            hidden = jax.nn.softmax(hidden @ weight @ hidden.T) @ hidden
            hidden = hidden - hidden.mean(-1, keepdims=True)
        return (hidden**2).mean()

    return jax.grad(loss)(weights)


def test_statistics_of_rows_made_again_are_the_same() -> None:
    args = (
        [jax.random.normal(jax.random.key(n), (8, 8)) for n in range(3)],
        jax.random.normal(jax.random.key(9), (16, 8)),
    )
    program, graph = program_of(attention, *args)
    layout = cut(graph, early_loose_ends(graph), 1, fuses_rows=True)
    assert layout.fleeting
    made = [v for v in layout.home if graph.ops[graph.producer[v] or 0].fusion == "elementwise"]
    decisions = {(v, s): Mode.DROP for v in made for s in range(layout.home[v] + 1, len(layout.segments))}
    for chosen in ({}, decisions):
        plan = Plan(unfold(layout, chosen)[0], graph.fingerprint, "")
        again = judge(plan, graph).recomputed
        assert any(graph.ops[op].along_rows for op in again)
        planned = as_step(program, rewrite(program, graph, plan))
        for one, other in zip(jax.jit(attention)(*args), jax.jit(planned)(*args), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


PLANS = {
    "recompute": ("compute 0", "|", "compute 1", "free 1", "|", "compute 2", "free 2", "|",
                  "compute 0", "compute 3", "free 1", "free 3", "|", "compute 4", "free 4"),
    "offload": ("compute 0", "offload 1", "|", "compute 1", "free 1", "|", "compute 2", "free 2", "prefetch 1", "|",
                "compute 3", "free 1", "free 3", "release 1", "|", "compute 4", "free 4"),
    "keep": ("compute 0", "compute 1", "compute 2", "|", "compute 3", "compute 4"),
}  # fmt: skip


@pytest.mark.parametrize("words", PLANS.values(), ids=PLANS)
def test_a_plan_by_hand_computes_the_same_to_the_bit(words: tuple[str, ...]) -> None:
    program, graph = program_of(chain, jnp.asarray(X))
    plan = by_hand(graph, *words)
    judge(plan, graph)
    planned = rewrite(program, graph, plan)
    check_types(program.jaxpr, planned)
    with jax.disable_jit():  # operation by operation nothing is fused: equal means equal
        expected = compat.jaxpr_as_fun(program.jaxpr)(jnp.asarray(X))
        found = compat.jaxpr_as_fun(planned)(jnp.asarray(X))
    np.testing.assert_array_equal(expected, found)


def test_a_recomputed_operation_stands_twice_and_in_its_place() -> None:
    program, graph = program_of(chain, jnp.asarray(X))
    names = primitives(rewrite(program, graph, by_hand(graph, *PLANS["recompute"])))
    assert names == ["sin", "optimization_barrier", "cos", "optimization_barrier", "tanh", "optimization_barrier",
                     "sin", "mul", "optimization_barrier", "reduce_sum"]  # fmt: skip


def test_an_offloaded_value_goes_to_host_memory_and_back() -> None:
    program, graph = program_of(chain, jnp.asarray(X))
    planned = rewrite(program, graph, by_hand(graph, *PLANS["offload"]))
    copies = [eqn for eqn in planned.jaxpr.eqns if eqn.primitive.name == "device_put"]
    assert [compat.aval_of(eqn.outvars[0]).memory_space for eqn in copies] == [
        jax.memory.Space.Host,
        jax.memory.Space.Device,
    ]
    # Its copy on the host, and nothing else, passes the fence before it comes back.
    fence = next(eqn for eqn in planned.jaxpr.eqns if copies[0].outvars[0] in eqn.invars)
    assert fence.primitive.name == "optimization_barrier"


def test_marks_name_segment_and_operation() -> None:
    program, graph = program_of(chain, jnp.asarray(X))
    planned = rewrite(program, graph, by_hand(graph, *PLANS["recompute"]))
    stacks = [compat.scope_of(eqn) for eqn in planned.jaxpr.eqns if eqn.primitive.name == "sin"]
    assert [stack.split("/")[0] for stack in stacks] == ["memplan.0.0", "memplan.3.0"]


def test_lines_of_the_user_survive() -> None:
    program, graph = program_of(chain, jnp.asarray(X))
    planned = rewrite(program, graph, by_hand(graph, *PLANS["recompute"]))
    assert all(
        "test_rewrite.py:" in compat.source_of(eqn)
        for eqn in planned.jaxpr.eqns
        if eqn.primitive.name != "optimization_barrier"
    )


def test_random_bits_come_from_the_same_key() -> None:
    def step(key: jax.Array) -> jax.Array:
        return jax.random.bits(key, (8,))

    program, graph = program_of(step, jax.random.key(7))
    twice = [action for op in range(len(graph.ops)) for action in [Action(Kind.COMPUTE, op)] * 2]
    freed = tuple(
        extra
        for first, second in zip(twice[::2], twice[1::2], strict=True)
        for extra in (first, *(Action(Kind.FREE, v) for v in graph.ops[first.target].outputs), second)
    )
    planned = rewrite(program, graph, Plan(freed, graph.fingerprint, "by hand", "cpu"))
    np.testing.assert_array_equal(compat.jaxpr_as_fun(planned)(jax.random.key(7))[0], step(jax.random.key(7)))


def test_effects_run_once_and_in_order() -> None:
    log: list[str] = []

    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: log.append("first"), ordered=True)
        y = jnp.sin(x)
        jax.debug.callback(lambda _: log.append("second"), y, ordered=True)
        jax.debug.callback(lambda _: log.append("third"), 1.0, ordered=True)
        return y * 2

    program, graph = program_of(step, jnp.asarray(X))
    plan = one_op_segments(graph)
    judge(plan, graph)
    planned = rewrite(program, graph, plan)
    assert {str(effect) for effect in planned.effects} == {str(effect) for effect in program.traced.jaxpr.effects}
    jax.block_until_ready(jax.jit(compat.jaxpr_as_fun(planned))(jnp.asarray(X)))
    jax.effects_barrier()
    assert log == ["first", "second", "third"]


def test_a_plan_for_another_program_is_refused() -> None:
    program, graph = program_of(chain, jnp.asarray(X))
    _, other = program_of(lambda x: jnp.sin(x) + 1, jnp.asarray(X))
    with pytest.raises(PlanMismatchError):
        rewrite(program, graph, one_op_segments(other))


def test_shardings_of_the_step_are_still_asked_for() -> None:
    program = traced(CASES["sharding constraint"])
    graph = extract(program)
    assert "sharding_constraint" in primitives(rewrite(program, graph, one_op_segments(graph)))


def test_types_are_reported_with_shape_and_dtype() -> None:
    assert types({"a": jnp.ones(3, jnp.bfloat16)}) == [((3,), jnp.bfloat16, False)]
