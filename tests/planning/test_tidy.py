"""What nobody needs goes; what is left is legal and makes the same outputs."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings

from memplan.planning.graph import Graph
from memplan.planning.plan import FENCE, Action, Kind, Plan
from memplan.planning.tidy import tidied
from memplan.planning.unfold import Mode, unfold
from memplan.verify.plan import judge
from tests.planning.graphs import DRAWS, chain, layout_of, random_decisions, random_graph


def test_a_run_whose_result_ends_unread_goes_with_its_end() -> None:
    graph = chain(2)
    first, second = Action(Kind.COMPUTE, 0), Action(Kind.COMPUTE, 1)
    free = Action(Kind.FREE, 1)
    plan = Plan((first, free, FENCE, first, second, free), graph.fingerprint, "")
    assert tidied(plan, graph).actions == (FENCE, first, second, free)


def test_a_copy_that_nobody_fetches_goes() -> None:
    graph = chain(2)
    first, second = Action(Kind.COMPUTE, 0), Action(Kind.COMPUTE, 1)
    plan = Plan((first, Action(Kind.OFFLOAD, 1), second, Action(Kind.RELEASE, 1)), graph.fingerprint, "")
    assert tidied(plan, graph).actions == (first, second)


@settings(max_examples=200, deadline=None)
@given(DRAWS)
def test_what_is_left_is_legal_and_all_of_it_useful(draw: random.Random) -> None:
    graph = random_graph(draw)
    layout = layout_of(graph)
    plan = Plan(unfold(layout, random_decisions(draw, layout, list(Mode)))[0], graph.fingerprint, "")
    tidy = tidied(plan, graph)
    judge(tidy, graph)
    left = iter(plan.actions)
    assert all(action in left for action in tidy.actions)  # a subsequence
    assert tidied(tidy, graph) is tidy
    gone = Counter(plan.actions) - Counter(tidy.actions)
    assert not any(action.kind is Kind.COMPUTE and not graph.ops[action.target].recomputable for action in gone)


@settings(max_examples=100, deadline=None)
@given(DRAWS)
def test_every_run_that_is_left_is_read(draw: random.Random) -> None:
    graph = random_graph(draw)
    layout = layout_of(graph)
    tidy = tidied(Plan(unfold(layout, random_decisions(draw, layout, list(Mode)))[0], graph.fingerprint, ""), graph)
    for place, action in enumerate(tidy.actions):
        if action.kind is Kind.COMPUTE and graph.ops[action.target].recomputable:
            assert any(_is_read(value, tidy.actions[place + 1 :], graph) for value in graph.ops[action.target].outputs)


def _is_read(value: int, later: tuple[Action, ...], graph: Graph) -> bool:
    for action in later:
        if action.kind is Kind.COMPUTE and value in graph.ops[action.target].inputs:
            return True
        if action == Action(Kind.OFFLOAD, value):
            return True
        if action == Action(Kind.FREE, value):
            return False
    return value in graph.outputs
