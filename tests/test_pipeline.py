"""Which candidates a budget brings about, compiled for described GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan.pipeline import Request, run
from memplan.planning.planners.protocol import Problem, Proposal
from memplan.planning.planners.registry import PLANNERS, planner_named
from tests.dense import step

# a chain of large products: each takes longer than a copy of its result over a fast link
WIDTH, ROWS, LAYERS, BUDGET = 2048, 16384, 8, 823_000_000


def report(host_budget: Any) -> Any:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    args = weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    planned = memplan.jit(step, device="v100", budget=BUDGET, host_budget=host_budget, donate_argnums=0)
    return planned.plan(*args).report


@pytest.mark.gpu_aot
@pytest.mark.slow
def test_values_move_where_their_copies_overlap_and_that_is_the_fastest() -> None:
    """Counted in full, the copies would take longer than computing again: the planner alone would not move them."""
    allowed, forbidden = report(None), report(0)
    assert allowed.status == forbidden.status == "fits"
    assert allowed.offloaded_bytes > 0 == forbidden.offloaded_bytes
    assert allowed.predicted_step_s < forbidden.predicted_step_s
    for found in (allowed, forbidden):
        timeline, (plain, compiled) = found.timeline, found.lines
        assert timeline.instants[timeline.peak].device_bytes == found.predicted_peak_bytes
        assert (max(plain.device_bytes), max(compiled.device_bytes)) == (
            found.baseline_peak_bytes,
            found.compiled_peak_bytes,
        )
    moved = sum(copy.nbytes for copy in allowed.timeline.copies if copy.direction == "to host")
    assert moved == allowed.offloaded_bytes and forbidden.timeline.copies == ()
    assert any(instant.host_bytes for instant in allowed.timeline.instants)


class Stubborn:
    """Plans for a budget of its own, whatever it is told."""

    name = "stubborn"

    def propose(self, problem: Problem) -> Proposal:
        return replace(planner_named("greedy").propose(replace(problem, budget_bytes=10**12)), fits=True)


def test_a_plan_that_did_not_fit_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "stubborn", Stubborn())
    weights = [jnp.ones((64, 64))] * LAYERS
    told: list[str] = []
    args = weights, jnp.ones((4096, 64))
    plain = memplan.jit(step).plan(*args).report
    request = Request(budget=plain.compiled_peak_bytes - 1, planner="stubborn")
    run(step, args, {}, {}, request, lambda what, share: told.append(what))
    first_of_the_other = told.index("planning, attempt 1", told.index("planning, attempt 1") + 1)
    assert told[:first_of_the_other].count("compiling the planned step") == 1


class Modest:
    """Takes seven tenths of what it is offered."""

    name = "modest"

    def __init__(self) -> None:
        self.offered: list[int] = []

    def propose(self, problem: Problem) -> Proposal:
        self.offered.append(problem.budget_bytes)
        return planner_named("greedy").propose(replace(problem, budget_bytes=problem.budget_bytes * 7 // 10))


def test_memory_that_a_plan_leaves_over_is_offered_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    modest = Modest()
    monkeypatch.setitem(PLANNERS, "modest", modest)
    weights = [jnp.ones((64, 64))] * LAYERS
    args = weights, jnp.ones((4096, 64))
    plain = memplan.jit(step).plan(*args).report
    request = Request(budget=plain.compiled_peak_bytes - 1, planner="modest")
    found = run(step, args, {}, {}, request, lambda what, share: None)
    assert len(modest.offered) == 2 and modest.offered[0] < modest.offered[1]
    assert found.report.status == "fits" and found.report.attempts == 2
