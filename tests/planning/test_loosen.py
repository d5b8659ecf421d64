"""Fewer fences: only where the text says, and nothing else changes."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings

from memplan.planning.graph import Graph
from memplan.planning.loosen import loosened
from memplan.planning.plan import FENCE, Kind, Plan
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import Mode, keep_everything, unfold
from memplan.verify.plan import judge
from tests.planning.graphs import DRAWS, UNIT, Builder, layout_of, random_decisions, random_graph, training_chain


def planned(graph: Graph, draw: random.Random, *modes: Mode) -> Plan:
    layout = layout_of(graph)
    return Plan(unfold(layout, random_decisions(draw, layout, modes))[0], graph.fingerprint, "")


@settings(max_examples=150, deadline=None)
@given(DRAWS)
def test_only_fences_go_and_what_they_kept_apart_and_the_plan_stays_legal(draw: random.Random) -> None:
    graph = random_graph(draw)
    plan = planned(graph, draw, Mode.DROP)
    timeline = Simulator(graph, UNIT).run(plan)
    loose = loosened(plan, timeline, layout_of(graph), draw.randint(0, 100))
    left = iter(plan.actions)
    assert all(action in left for action in loose.actions)  # a subsequence
    account = judge(loose, graph)
    gone = Counter(plan.actions) - Counter(loose.actions)
    assert {action.kind for action in gone} <= {Kind.FENCE, Kind.FREE, Kind.COMPUTE}
    for segment in loose.segments():
        ops = [action.target for action in segment if action.kind is Kind.COMPUTE]
        assert len(ops) == len(set(ops))
    again = Counter({action.target: times for action, times in gone.items() if action.kind is Kind.COMPUTE})
    assert account.recomputed == dict(Counter(judge(plan, graph).recomputed) - again)


def test_two_runs_without_a_fence_between_them_are_one() -> None:
    graph = training_chain([10, 10])
    layout = layout_of(graph)
    plan = Plan(unfold(layout, {(1, 3): Mode.DROP})[0], graph.fingerprint, "")
    timeline = Simulator(graph, UNIT).run(plan)
    assert judge(plan, graph).recomputed == {0: 1}
    loose = loosened(plan, timeline, layout, 10**9)
    assert judge(loose, graph).recomputed == {} and loose.actions.count(FENCE) < plan.actions.count(FENCE)


@settings(max_examples=60, deadline=None)
@given(DRAWS)
def test_a_plan_that_moves_values_keeps_all(draw: random.Random) -> None:
    graph = random_graph(draw)
    plan = planned(graph, draw, Mode.OFFLOAD, Mode.OFFLOAD_NOW)
    timeline = Simulator(graph, UNIT).run(plan)
    moves = any(action.kind is Kind.OFFLOAD for action in plan.actions)
    assert (loosened(plan, timeline, layout_of(graph), 10**9) == plan) or not moves


def test_nothing_runs_twice_before_a_fence_that_goes() -> None:
    graph = training_chain([10, 10])  # values: 0 argument, 1 and 2 forward, 3 loss, 4 and 5 backward
    layout = layout_of(graph)
    plan = Plan(unfold(layout, {(1, 3): Mode.DROP})[0], graph.fingerprint, "")
    timeline = Simulator(graph, UNIT).run(plan)
    fences = [sum(a == FENCE for a in plan.actions[:i]) for i, a in enumerate(plan.actions) if a.kind is Kind.COMPUTE]
    loose = loosened(plan, timeline, layout_of(graph), 0)
    left = [sum(a == FENCE for a in loose.actions[:i]) for i, a in enumerate(loose.actions) if a.kind is Kind.COMPUTE]
    assert fences == [0, 1, 2, 3, 4, 5] and left == [0, 0, 0, 1, 2, 3]


def test_with_room_everywhere_and_nothing_twice_all_go() -> None:
    graph = training_chain([10, 10, 10])
    plan = keep_everything(layout_of(graph), "")
    assert FENCE not in loosened(plan, Simulator(graph, UNIT).run(plan), layout_of(graph), 0).actions
    again = Plan(unfold(layout_of(graph), {(1, 5): Mode.DROP})[0], graph.fingerprint, "")
    timeline = Simulator(graph, UNIT).run(again)
    assert FENCE in again.actions
    assert FENCE not in loosened(again, timeline, layout_of(graph), timeline.peak_nbytes + 1).actions


def test_transparent_ops_may_run_twice_before_a_fence_that_goes() -> None:
    b = Builder()
    made = b.op([b.argument(10)], 10)
    light = b.op([made], 10, "elementwise")
    total = b.op([light], 5, "reduction")
    graph = b.build(b.op([b.op([light, total], 10, "elementwise")], 10))
    for finely in (True, False):
        layout = layout_of(graph, 10, finely=True)
        plan = keep_everything(layout, "")
        assert [a.target for a in plan.actions if a.kind is Kind.COMPUTE] == [0, 1, 2, 1, 3, 4]
        loose = loosened(plan, Simulator(graph, UNIT).run(plan), layout_of(graph, 10, finely=finely), 0)
        assert loose.actions.count(FENCE) == (0 if finely else 2)
