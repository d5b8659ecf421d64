"""The greedy planner: legal plans, a kept word about fitting, and peaks close to what trying everything finds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import MemplanError
from memplan.planning.devices import Device
from memplan.planning.floor import floor
from memplan.planning.graph import Graph
from memplan.planning.layout import Layout
from memplan.planning.plan import Kind, Plan
from memplan.planning.planners.greedy import GreedyPlanner
from memplan.planning.planners.protocol import Problem, Proposal, fence_nbytes
from memplan.planning.planners.registry import DEFAULT, PLANNERS, planner_named
from memplan.planning.simulate import Simulator, base_nbytes
from memplan.planning.unfold import Decisions, keep_everything, unfold
from memplan.verify.plan import judge
from tests.planning.graphs import (
    DRAWS,
    UNIT,
    UNIT_GPU,
    Builder,
    chain,
    check,
    every_drop,
    every_recomputation,
    fan_out,
    layout_of,
    random_graph,
    training_chain,
    training_stack,
)  # fmt: skip

PLENTY = 10**9


def propose(graph: Graph, budget: int, host: int = 0, device: Device = UNIT) -> Proposal:
    return GreedyPlanner().propose(Problem(graph, device, budget, host))


def kept(graph: Graph, budget: int = PLENTY) -> Plan:
    return keep_everything(layout_of(graph, fence_nbytes(budget)), UNIT.name)


def kept_peak(graph: Graph) -> int:
    return Simulator(graph, UNIT).run(kept(graph, 1)).peak_nbytes


@settings(max_examples=200, deadline=None)
@given(DRAWS, st.sampled_from([UNIT, UNIT_GPU]))
def test_every_proposal_is_legal_and_keeps_its_word(draw: random.Random, device: Device) -> None:
    graph = random_graph(draw, most=20)
    budget, host = draw.randint(0, 200), draw.choice([0, draw.randint(1, 60), PLENTY])
    check(graph, propose(graph, budget, host, device), budget, host, device)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=14), st.integers(0, 60), st.sampled_from([0, 5, 12, PLENTY]))
def test_every_proposal_for_a_training_chain_keeps_its_word(sizes: list[int], budget: int, host: int) -> None:
    graph = training_chain(sizes, flops=20.0)
    check(graph, propose(graph, budget, host), budget, host)


@settings(max_examples=60, deadline=None)
@given(DRAWS)
def test_a_budget_for_everything_changes_nothing(draw: random.Random) -> None:
    graph = random_graph(draw)
    assert propose(graph, PLENTY, PLENTY).plan.actions == kept(graph).actions


@settings(max_examples=60, deadline=None)
@given(DRAWS)
def test_a_budget_below_the_floor_never_fits(draw: random.Random) -> None:
    graph = random_graph(draw)
    assert not propose(graph, floor(graph).nbytes - 1, PLENTY).fits


def test_without_host_memory_nothing_is_offloaded() -> None:
    graph = training_chain([10] * 12)
    kinds = Counter(action.kind for action in propose(graph, 60).plan.actions)
    assert not kinds[Kind.OFFLOAD] and kinds[Kind.COMPUTE] > len(graph.ops)


def test_what_may_not_run_again_is_offloaded() -> None:
    b = Builder()
    forward = [b.argument(10)]
    for _ in range(8):
        forward.append(b.op([forward[-1]], 10, recomputable=False, why_not="it prints"))
    gradient = forward[-1]
    for value in reversed(forward):
        gradient = b.op([gradient, value], 10)
    graph = b.build(gradient)
    budget = kept_peak(graph) - 30
    assert not propose(graph, budget).fits
    proposal = propose(graph, budget, PLENTY)
    assert proposal.fits and not judge(proposal.plan, graph).recomputed
    check(graph, proposal, budget, PLENTY)


def test_a_small_host_budget_is_used_and_kept_in_one_round_too() -> None:
    graph = training_chain([10] * 20, flops=10_000.0)  # recomputing costs far more than copying
    for host in (10, 25, 50):
        proposal = propose(graph, 120, host)
        assert proposal.fits and 0 < proposal.timeline.host_peak_nbytes <= host


def test_what_needs_too_much_to_be_made_again_comes_from_the_host() -> None:
    b = Builder()
    large = b.op([b.op([b.argument(1)], 10)], 100)
    read_later = b.op([large], 60)
    crowded = b.op([b.op([b.op([read_later], 1)], 130)], 40)
    graph = b.build(b.op([read_later, crowded], 1))
    slow = replace(UNIT, link=replace(UNIT.link, bandwidth=0.01))  # so recomputation is tried first
    assert not propose(graph, 180, 0, slow).fits
    proposal = propose(graph, 180, PLENTY, slow)
    assert proposal.fits and [copy.value for copy in proposal.timeline.copies] == [read_later, read_later]


def oracle(graph: Graph, every: Callable[[Layout], Iterable[Decisions]] = every_recomputation) -> int:
    """The smallest peak that trying everything reaches."""
    layout, simulator = layout_of(graph), Simulator(graph, UNIT)
    return min(simulator.run(Plan(unfold(layout, found)[0], "", "")).peak_nbytes for found in every(layout))


def test_starting_again_from_a_forward_value_is_all_there_is_to_recomputing_a_chain() -> None:
    graph = training_chain([10] * 2)
    assert oracle(graph) == oracle(graph, every_drop)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_training_chains_need_two_values_more_than_trying_everything(sizes: list[int]) -> None:
    """One of them: what is recomputed on the way to a value and read by the next segment is kept until there."""
    graph = training_chain(sizes)
    assert propose(graph, oracle(graph) + 2 * max(sizes)).fits


@pytest.mark.parametrize("length", [*range(1, 12), 20, 40, 80])
def test_training_chains_of_any_length_fit_in_twice_the_square_root(length: int) -> None:
    """Chen et al., Training Deep Nets with Sublinear Memory Cost (2016): one checkpoint per run, one run at a time."""
    nbytes = 10
    graph = training_chain([nbytes] * length)
    checkpoints = int(2 * length**0.5 + 1) * nbytes
    assert propose(graph, floor(graph).nbytes + checkpoints).fits


def test_training_stacks_fit_in_half() -> None:
    for depth in (4, 8, 16, 32):
        graph = training_stack(depth)
        for host in (0, PLENTY):
            budget = (kept_peak(graph) + floor(graph).nbytes) // 2
            proposal = propose(graph, budget, host)
            assert proposal.fits
            check(graph, proposal, budget, host)


def test_slack_is_planned_around() -> None:
    graph = training_chain([10] * 12)
    budget = 90
    slack = dict.fromkeys(range(len(graph.ops)), 15)
    proposal = GreedyPlanner().propose(Problem(graph, UNIT, budget, 0, slack))
    assert proposal.fits and proposal.timeline.peak_nbytes <= budget
    assert Simulator(graph, UNIT).run(proposal.plan).peak_nbytes == proposal.timeline.peak_nbytes - 15


def test_plans_do_not_depend_on_names_or_on_the_run() -> None:
    graph = training_stack(8)
    renamed = replace(graph, values=tuple(replace(v, name=v.name[::-1]) for v in graph.values))
    budget = kept_peak(graph) * 2 // 3
    assert propose(graph, budget, 300) == propose(graph, budget, 300) == propose(renamed, budget, 300)


@pytest.mark.parametrize("graph", [Builder().build(), chain(0), chain(3, fusion="view"), fan_out(3)])
def test_steps_with_nothing_to_decide(graph: Graph) -> None:
    resident = base_nbytes(graph)
    assert propose(graph, PLENTY).fits
    assert not propose(graph, resident - 1).fits


@pytest.mark.slow
def test_three_thousand_operations() -> None:
    graph = training_chain([1000] * 1500)
    proposal = propose(graph, 1400 * 1000)
    assert proposal.fits
    check(graph, proposal, 1400 * 1000, 0)


def test_the_host_is_left_alone_where_copies_cost_more_than_computing() -> None:
    graph = training_chain([10] * 12)
    slow = replace(UNIT, link=replace(UNIT.link, bandwidth=1e-3))
    for budget in (60, 80, 100):
        without, allowed = (GreedyPlanner().propose(Problem(graph, slow, budget, host)) for host in (0, PLENTY))
        assert allowed.timeline.step_s <= without.timeline.step_s or allowed.fits > without.fits


def test_a_long_forward_chain_needs_no_decisions() -> None:
    graph = chain(3000)
    proposal = propose(graph, 40)
    assert proposal.fits and proposal.plan.actions == kept(graph, 40).actions


def test_planners_go_by_name() -> None:
    assert planner_named(None) is planner_named(DEFAULT) is PLANNERS["milp"]
    assert all(name == planner.name for name, planner in PLANNERS.items())
    with pytest.raises(MemplanError, match=r"no planner 'magic'. Choose one of: greedy, milp"):
        planner_named("magic")
