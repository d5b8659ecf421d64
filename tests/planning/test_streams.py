"""Copies beside computation: by hand, and what holds for every plan. A byte of memory or link takes a second."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings

from memplan.planning.graph import Graph
from memplan.planning.plan import FENCE, Action, Kind, Plan, copy_of
from memplan.planning.simulate import Simulator
from memplan.planning.streams import streamed
from memplan.planning.unfold import Mode, unfold
from memplan.verify.plan import judge
from tests.planning.graphs import DRAWS, UNIT, Builder, layout_of, random_decisions, random_graph


def spread(plan: Plan, graph: Graph, budget: int) -> Plan:
    return streamed(plan, graph, UNIT, Simulator(graph, UNIT).run(plan), budget)


def planned(graph: Graph, *segments: list[tuple[Kind, int]]) -> Plan:
    actions = [action for segment in segments for action in (*(Action(*one) for one in segment), FENCE)]
    return Plan(tuple(actions[:-1]), graph.fingerprint, "")


def kinds(plan: Plan, kind: Kind) -> dict[int, int]:
    """Segment of the last action of that kind, by its target."""
    return {a.target: number for number, segment in enumerate(plan.segments()) for a in segment if a.kind is kind}


def streaming_graph() -> Graph:
    """Two layers of work; the second reads 10 bytes from the host, and what it makes of them goes there."""
    graph = Builder()
    state, x = graph.argument(0), graph.argument(10)
    first = graph.op([x], 10)
    second = graph.op([first], 10)
    fetched = graph.op([state], 10, crosses_memories=True)
    made = graph.op([second, fetched], 10)
    put = graph.op([made], 0, crosses_memories=True)
    last = graph.op([second], 10)
    end = graph.op([last], 10)
    return graph.build(put, end)


def written(graph: Graph) -> Plan:
    compute, free = Kind.COMPUTE, Kind.FREE
    return planned(
        graph,
        [(compute, 0)],
        [(compute, 1), (free, 2)],
        [(compute, 2), (compute, 3), (free, 4), (compute, 4), (free, 5)],
        [(compute, 5)],
        [(compute, 6)],
    )


def test_a_copy_from_the_host_begins_so_early_that_it_is_there_when_it_is_read() -> None:
    graph = streaming_graph()
    plan = written(graph)
    before, after = Simulator(graph, UNIT).run(plan), Simulator(graph, UNIT).run(spread(plan, graph, 100))
    assert before.moments[2].stall_s > 0 and after.moments[2].stall_s == 0
    assert after.step_s < before.step_s
    assert kinds(spread(plan, graph, 100), Kind.COMPUTE)[2] == 1  # the segment before lasts as long as the copy


def test_a_copy_to_the_host_has_the_segments_after_it() -> None:
    graph = streaming_graph()
    loose = spread(written(graph), graph, 100)
    assert kinds(loose, Kind.COMPUTE)[4] == 3 and kinds(loose, Kind.FREE)[graph.ops[3].outputs[0]] == 3


def test_without_room_nothing_moves() -> None:
    graph = streaming_graph()
    plan = written(graph)
    least = min(moment.device_nbytes for moment in Simulator(graph, UNIT).run(plan).moments)
    assert spread(plan, graph, least) == plan


@settings(max_examples=200, deadline=None)
@given(DRAWS)
def test_the_same_work_in_the_same_order_within_the_budget(draw: random.Random) -> None:
    graph = random_graph(draw)
    layout = layout_of(graph)
    modes = [Mode.OFFLOAD, Mode.OFFLOAD_NOW, Mode.DROP]
    plan = Plan(unfold(layout, random_decisions(draw, layout, modes))[0], graph.fingerprint, "")
    timeline = Simulator(graph, UNIT).run(plan)
    budget = timeline.peak_nbytes + draw.randint(0, 60)
    loose = spread(plan, graph, budget)
    judge(loose, graph)
    assert Counter(loose.actions) == Counter(plan.actions)

    def work(one: Plan) -> list[list[Action]]:
        still = (Kind.FREE, Kind.RELEASE)
        return [[a for a in part if not copy_of(a, graph) and a.kind not in still] for part in one.segments()]

    assert work(loose) == work(plan)
    assert Simulator(graph, UNIT).run(loose).peak_nbytes <= budget
