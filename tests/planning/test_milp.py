"""The mixed-integer planner: legal plans, a kept word about fitting, and as good as trying everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.planning.devices import Device
from memplan.planning.graph import Graph
from memplan.planning.plan import Plan
from memplan.planning.planners.greedy import GreedyPlanner
from memplan.planning.planners.milp import MilpPlanner
from memplan.planning.planners.protocol import Problem, Proposal, rank
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import unfold
from tests.planning.graphs import (
    DRAWS,
    UNIT,
    UNIT_GPU,
    check,
    every_recomputation,
    layout_of,
    random_graph,
    training_chain,
)

PLENTY = 10**9


def propose(graph: Graph, budget: int, host: int = 0, device: Device = UNIT) -> Proposal:
    return MilpPlanner().propose(Problem(graph, device, budget, host))


@settings(max_examples=60, deadline=None)
@given(DRAWS, st.sampled_from([UNIT, UNIT_GPU]))
def test_every_proposal_is_legal_and_keeps_its_word(draw: random.Random, device: Device) -> None:
    graph = random_graph(draw, most=20)
    budget, host = draw.randint(0, 200), draw.choice([0, draw.randint(1, 60), PLENTY])
    check(graph, propose(graph, budget, host, device), budget, host, device)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=6), st.integers(20, 60))
@pytest.mark.slow
def test_a_training_chain_is_planned_as_well_as_by_trying_everything_with_one_value_less(
    sizes: list[int], budget: int
) -> None:
    """The program adds up what the kernels of a segment that run again need, though they run one after the other."""
    graph = training_chain(sizes, flops=20.0)
    layout, simulator = layout_of(graph), Simulator(graph, UNIT)
    every = (unfold(layout, tried)[0] for tried in every_recomputation(layout))
    plans = (Plan(actions, graph.fingerprint, "all", UNIT.name) for actions in every)
    timelines = [timeline for timeline in map(simulator.run, plans) if timeline.peak_nbytes <= budget - max(sizes)]
    found = propose(graph, budget)
    if timelines:
        assert found.fits
        assert found.timeline.step_s <= 1.02 * min(timeline.step_s for timeline in timelines)


def test_what_is_cheap_to_make_again_goes_first() -> None:
    graph = training_chain([10] * 6, flops=20.0)
    kept = propose(graph, PLENTY)
    squeezed = propose(graph, kept.timeline.peak_nbytes - 10)
    assert squeezed.fits
    assert kept.timeline.step_s < squeezed.timeline.step_s < 1.2 * kept.timeline.step_s


@settings(max_examples=30, deadline=None)
@given(DRAWS)
def test_it_is_never_worse_than_eviction(draw: random.Random) -> None:
    graph = random_graph(draw, most=20)
    problem = Problem(graph, UNIT, draw.randint(20, 150), 0)
    assert rank(MilpPlanner().propose(problem)) <= rank(GreedyPlanner().propose(problem))


def test_without_time_the_answer_is_still_legal() -> None:
    graph = training_chain([10] * 5)
    problem = Problem(graph, UNIT, 30, 0)
    check(graph, MilpPlanner(seconds=0.0).propose(problem), 30, 0)
