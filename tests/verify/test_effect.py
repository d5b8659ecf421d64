"""What a plan says is found in the executable, or it is said what is missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan.api import Planned
from memplan.errors import PlanMismatchError
from memplan.planning.graph import Graph
from memplan.planning.loop import Loop, Residuals
from memplan.planning.plan import FENCE, Action, Kind, Plan
from memplan.verify.effect import effect
from tests.planning.graphs import Builder, chain, training_chain
from tests.program.test_targets import needs_compiler


def marks(*found: tuple[int, int]) -> str:
    """HLO text, as far as anybody looks, of kernels in these segments."""
    return "\n".join(f'%a = f32[1] add(), metadata={{op_name="jit(f)/memplan.{s}.{op}/add"}}' for s, op in found)


def products() -> Graph:
    """Six matrix products of one FLOP each."""
    graph = training_chain([10, 10], flops=1.0)
    return replace(graph, ops=tuple(replace(op, flops_dtype="float32") for op in graph.ops))


def moving_plan(graph: Graph) -> Plan:
    """The first value goes to the host and comes back, the first operation runs again in the last segment."""
    actions = [
        Action(Kind.COMPUTE, 0), Action(Kind.OFFLOAD, 1), Action(Kind.FREE, 1), FENCE,
        Action(Kind.COMPUTE, 0), Action(Kind.COMPUTE, 1), Action(Kind.FREE, 1), FENCE,
        Action(Kind.PREFETCH, 1),
    ]  # fmt: skip
    return Plan(tuple(actions), graph.fingerprint, "")


def test_what_is_there_is_counted() -> None:
    graph = products()
    text, copies = marks((0, 0), (1, 0), (1, 1)), {("out", 10): 1, ("in", 10): 1}
    found = effect(moving_plan(graph), graph, (), text, copies, 7.0, lambda: 6.0)
    assert (found.copies, found.recomputations, found.dropped) == (2, 1, ())


@pytest.mark.parametrize(
    ("copies", "text", "missing"),
    [
        ({("in", 10): 1}, marks((0, 0), (1, 0)), "to the host 0 times instead of 1"),
        ({("out", 10): 2}, marks((0, 0), (1, 0)), "from the host 0 times instead of 1"),
        ({("out", 12): 1, ("in", 10): 1}, marks((0, 0), (1, 0)), "to the host 0 times instead of 1"),
        ({("out", 10): 1, ("in", 10): 1}, marks((1, 0)), "is computed again 0 times instead of 1"),
    ],
)
def test_what_is_missing_is_said(copies: dict[tuple[str, int], int], text: str, missing: str) -> None:
    graph = products()
    (dropped,) = effect(moving_plan(graph), graph, (), text, copies, 6.0, lambda: 6.0).dropped
    assert missing in dropped


def test_kernels_without_any_mark_are_none() -> None:
    graph = products()
    copies = {("out", 10): 1, ("in", 10): 1}
    assert effect(moving_plan(graph), graph, (), "", copies, 6.0, lambda: 6.0).recomputations == 0


def test_a_lost_mark_without_lost_work_is_a_merged_kernel() -> None:
    graph = products()
    copies = {("out", 10): 1, ("in", 10): 1}
    found = effect(moving_plan(graph), graph, (), marks((1, 0)), copies, 7.0, lambda: 6.0)
    assert (found.recomputations, found.dropped) == (1, ())


def test_work_that_melts_is_not_looked_for() -> None:
    graph = chain(2, fusion="elementwise")
    actions = (Action(Kind.COMPUTE, 0), FENCE, Action(Kind.COMPUTE, 0), Action(Kind.COMPUTE, 1))
    assert effect(Plan(actions, graph.fingerprint, ""), graph, (), marks((0, 0)), {}, 0.0, lambda: 0.0).dropped == ()


def test_every_trip_of_a_loop_copies_a_slice() -> None:
    body = chain(2, nbytes=10)
    loop = Loop(body, trips=3, runs=2, given=frozenset(), needed=frozenset({1}))
    graph = Builder()
    plan = Plan((), graph.build(graph.argument(1)).fingerprint, "")
    loops = ((loop, Residuals(kept=(), moved=(1,))),)
    assert effect(plan, chain(1), loops, "", {("out", 10): 6, ("in", 10): 6}, 0.0, lambda: 0.0).copies == 12
    (dropped,) = effect(plan, chain(1), loops, "", {("out", 10): 6, ("in", 10): 5}, 0.0, lambda: 0.0).dropped
    assert "5 times instead of 6" in dropped


ARGS = jax.ShapeDtypeStruct((4, 256, 256), jnp.float32), jax.ShapeDtypeStruct((65536, 256), jnp.float32)


def four_layers(weights: jax.Array, x: jax.Array) -> jax.Array:
    def loss(weights: jax.Array) -> jax.Array:
        y = x
        for layer in range(4):
            y = jnp.tanh(y @ weights[layer])
        return jnp.sum(y * y)

    return weights - 0.1 * jax.grad(loss)(weights)


def tight_plan() -> Planned:
    """Within 70 % of what the step takes."""
    plain = memplan.jit(four_layers, device="a100", budget="10GiB").plan(*ARGS)
    budget = int(0.7 * (plain.report.baseline_peak_bytes or 0))
    return memplan.jit(four_layers, device="a100", budget=budget, host_budget=0).plan(*ARGS)


@needs_compiler
@pytest.mark.gpu_aot
def test_a_compiled_plan_takes_effect() -> None:
    planned = tight_plan()
    assert planned.plan is not None and (planned.report.recomputations_found or 0) > 0
    assert not any(row.verdict.startswith("refused") for row in planned.report.candidates)


@needs_compiler
@pytest.mark.gpu_aot
@pytest.mark.slow
def test_a_plan_that_the_compiler_does_not_carry_out_is_refused() -> None:
    plan = tight_plan().plan
    assert plan is not None
    unfenced = tuple(action for action in plan.actions if action != FENCE)  # two runs of an operation become one
    careless = Plan(unfenced, plan.fingerprint, plan.planner, plan.device)
    runs = Counter(action for action in unfenced if action.kind is Kind.COMPUTE)
    assert max(runs.values()) > 1
    with pytest.raises(PlanMismatchError, match="does not carry out"):
        memplan.jit(four_layers, device="a100", budget="10GiB", host_budget=0, plan=careless).plan(*ARGS)
