"""The same planners on steps: legal plans that fit, as good as eviction's; copies beside computation cost nothing."""

from __future__ import annotations

import pytest

from memplan.planning.graph import Graph
from memplan.planning.planners.exact import ExactPlanner, solve_step
from memplan.planning.planners.greedy import GreedyPlanner
from memplan.planning.planners.protocol import Planner, Problem, rank
from memplan.planning.planners.scaled import ScaledPlanner
from memplan.planning.stages import Stages
from memplan.verify.plan import judge
from tests.planning.graphs import UNIT, training_chain, training_stack

STEPS = {"stack": training_stack(6), "chain": training_chain([100] * 10, 50.0)}


def problem(graph: Graph, share: float, host_bytes: int = 0) -> Problem:
    kept = GreedyPlanner().propose(Problem(graph, UNIT, 10**9, 0)).timeline.peak_nbytes
    return Problem(graph, UNIT, int(share * kept), host_bytes)


@pytest.mark.parametrize("planner", [ExactPlanner(120.0), ScaledPlanner(8.0)], ids=lambda planner: planner.name)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("host_bytes", [0, 10**6])
def test_plans_fit_and_are_as_good_as_evictions(planner: Planner, name: str, host_bytes: int) -> None:
    asked = problem(STEPS[name], 0.75, host_bytes)
    found = planner.propose(asked)
    judge(found.plan, asked.graph)
    alone = GreedyPlanner().propose(Problem(asked.graph, UNIT, asked.budget_bytes, 0))
    assert found.fits and found.timeline.peak_nbytes <= asked.budget_bytes
    assert rank(found)[:2] <= rank(alone)[:2]


def test_copies_beside_the_computation_are_free_while_the_link_has_time() -> None:
    asked = problem(STEPS["chain"], 0.75, 10**6)
    found = ExactPlanner(120.0, beside=True).propose(asked)
    kept = GreedyPlanner().propose(Problem(asked.graph, UNIT, 10**9, 0)).timeline
    assert found.fits and found.timeline.copies
    assert found.timeline.step_s == kept.step_s


def moving(host_budget_bytes: int, copy: int) -> Stages:
    """One item of four bytes that crosses a stage of eight; it may not be computed again."""
    return Stages(
        nbytes=(4, 1, 1, 8, 1, 1),
        ticks=(None,) * 6,
        inputs=((), (0,), (1,), (2,), (3,), (0, 4)),
        home=(0, 1, 2, 3, 4, 5),
        uses=((1, 5 + 1), (2,), (3,), (4,), (5,), ()),
        working_nbytes=(0,) * 7,
        own_ticks=(10,) * 7,
        budget_bytes=11,
        host_budget_bytes=host_budget_bytes,
        copy_ticks=(copy,) * 6,
        late=True,
    )


@pytest.mark.parametrize(("copy", "beside", "extra"), [(3, False, 6), (3, True, 0), (25, True, 30)])
def test_what_a_move_costs(copy: int, beside: bool, extra: int) -> None:
    answer = solve_step(moving(4, copy), 60.0, beside)
    assert (answer.status, answer.moved) == ("optimal", {(0, 6)})
    assert answer.extra_ticks == extra


def test_the_host_has_a_budget_too() -> None:
    assert solve_step(moving(3, 3), 60.0).again is None
