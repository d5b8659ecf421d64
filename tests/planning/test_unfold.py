"""Any decisions about any graph become a legal plan: everything runs, nothing moves in vain, nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings

from memplan.planning.graph import Graph
from memplan.planning.layout import Layout, cut
from memplan.planning.plan import Action, Kind, Plan
from memplan.planning.unfold import Decisions, Demand, Mode, keep_everything, unfold
from memplan.verify.plan import Account, judge
from tests.planning.graphs import (
    DRAWS,
    Builder,
    chain,
    diamond,
    layout_of,
    random_decisions,
    random_graph,
    training_chain,
)

C, F, OUT, IN, R = Kind.COMPUTE, Kind.FREE, Kind.OFFLOAD, Kind.PREFETCH, Kind.RELEASE


def accepted(graph: Graph, actions: tuple[Action, ...]) -> Account:
    return judge(Plan(actions, graph.fingerprint, "test"), graph)


def case(draw: random.Random) -> tuple[Graph, Layout, Decisions]:
    graph = random_graph(draw)
    rows, finely = draw.random() < 0.5, draw.random() < 0.5
    layout = layout_of(graph, draw.choice([1, 1, 15, 1000]), rows, finely)
    return graph, layout, random_decisions(draw, layout)


def kinds(actions: tuple[Action, ...]) -> Counter[Kind]:
    return Counter(action.kind for action in actions)


def runs(actions: tuple[Action, ...]) -> Counter[int]:
    return Counter(action.target for action in actions if action.kind is C)


@settings(max_examples=250, deadline=None)
@given(DRAWS)
def test_any_decisions_make_a_legal_plan(draw: random.Random) -> None:
    graph, layout, decisions = case(draw)
    actions, origins = unfold(layout, decisions)
    accepted(graph, actions)
    assert list(origins) == sorted(origins) and set(origins) == set(range(len(layout.segments)))
    assert len(list(Plan(actions, "", "").segments())) == len(origins) or not actions


@settings(max_examples=120, deadline=None)
@given(DRAWS)
def test_everything_runs_and_effects_run_once_in_order(draw: random.Random) -> None:
    graph, layout, decisions = case(draw)
    actions, _ = unfold(layout, decisions)
    counted = runs(actions)
    for number, op in enumerate(graph.ops):
        if op.fusion != "view":
            assert counted[number] == 1 or (counted[number] > 1 and op.recomputable)
    effects = [a.target for a in actions if a.kind is C and not graph.ops[a.target].recomputable]
    assert effects == [number for number, op in enumerate(graph.ops) if not op.recomputable]


@settings(max_examples=120, deadline=None)
@given(DRAWS)
def test_views_are_made_only_where_they_are_read(draw: random.Random) -> None:
    graph, layout, decisions = case(draw)
    segments = list(Plan(unfold(layout, decisions)[0], "", "").segments())
    for position, segment in enumerate(segments):
        made = [a.target for a in segment if a.kind is C]
        assert len(made) == len(set(made)), "an operation runs twice in one segment"
        read = {value for op in made for value in graph.ops[op].inputs}
        read |= graph.returned if position == len(segments) - 1 else set()
        assert all(read.intersection(graph.ops[op].outputs) for op in made if graph.ops[op].fusion == "view")


@settings(max_examples=250, deadline=None)
@given(DRAWS)
def test_nothing_is_left_behind_and_nothing_moves_in_vain(draw: random.Random) -> None:
    graph, layout, decisions = case(draw)
    actions, _ = unfold(layout, decisions)
    device, host, moved = set(graph.inputs), set[int](), Counter[int]()
    for action in actions:
        value = action.target
        if action.kind is C:
            fresh = set(graph.ops[value].outputs) - layout.returned
            assert not fresh & device, "made while it is still there"
            device.update(graph.ops[value].outputs)
        elif action.kind is IN:
            assert value not in device, "fetched while it is still there"
            device.add(value)
            moved[value] += 1
        elif action.kind is F:
            device.remove(value)
        elif action.kind is OUT:
            host.add(value)
            moved[value] = 0
        elif action.kind is R:
            host.remove(value)
            assert moved[value], "copied to the host and never fetched"
    assert not host
    views = {value for op in graph.ops if op.fusion == "view" for value in op.outputs}
    assert device - views == set(graph.inputs) | (layout.returned - views)


@settings(max_examples=60, deadline=None)
@given(DRAWS)
def test_without_decisions_nothing_is_repeated_or_moved(draw: random.Random) -> None:
    graph = random_graph(draw)
    layout = layout_of(graph)
    plan = keep_everything(layout, "v100")
    assert plan.device == "v100" and plan.fingerprint == graph.fingerprint
    assert not set(kinds(plan.actions)) & {OUT, IN, R}
    assert all(n == 1 for op, n in runs(plan.actions).items() if graph.ops[op].fusion != "view")
    judge(plan, graph)


def test_every_heavy_kernel_gets_a_segment_and_light_work_joins_it() -> None:
    b = Builder()
    first = b.op([b.argument(100)], 100)
    light = b.op([first], 1, "elementwise")
    second = b.op([first, light], 100)
    tiny = b.op([light], 1)
    graph = b.build(second, tiny)
    assert cut(graph, range(4), 50).segments == ((0, 1), (2, 3))
    assert cut(graph, range(4), 1).segments == ((0, 1), (2,), (3,))
    assert cut(graph, range(4), 10_000).segments == ((0, 1, 2, 3),)


def normalization() -> Graph:
    """Values: 0 argument, 1 product, 2 its sum, 3 centred, 4 squared, 5 its sum, 6 normalized, 7 product."""
    b = Builder()
    rows = b.op([b.argument(100)], 100)
    mean = b.op([rows], 10, "reduction")
    centred = b.op([rows, mean], 100, "elementwise")
    squared = b.op([centred], 100, "elementwise")
    variance = b.op([squared], 10, "reduction")
    return b.build(b.op([b.op([centred, variance], 100, "elementwise")], 100))


def test_a_fine_cut_parts_before_large_work_that_needs_a_reduction() -> None:
    graph = normalization()
    coarse, fine = layout_of(graph, 50), layout_of(graph, 50, finely=True)
    assert coarse.segments == ((0, 1, 2, 3, 4, 5), (6,))
    assert fine.segments == ((0, 1, 4), (5,), (6,))


def test_in_a_fine_cut_elementwise_work_on_one_large_value_is_transparent() -> None:
    fine = layout_of(normalization(), 50, finely=True)
    assert fine.transparent == {2, 3}
    assert fine.reads == (frozenset(), {1, 2, 5}, {6})
    actions, _ = unfold(fine, {})
    assert [a.target for a in actions if a.kind is C] == [0, 1, 2, 3, 4, 2, 5, 6]


@pytest.mark.parametrize(
    ("made", "facts", "transparent"),
    [(100, {}, True), (99, {}, False), (100, {"recomputable": False}, False), (100, {"fusion": "kernel"}, False)],
)
def test_what_is_transparent_makes_no_less_than_it_reads(made: int, facts: Any, transparent: bool) -> None:
    b = Builder()
    other = b.op([b.op([b.argument(100)], 100)], made, **{"fusion": "elementwise", **facts})
    graph = b.build(b.op([b.op([other], 1, "reduction")], 1))
    assert (1 in layout_of(graph, 50, finely=True).transparent) == transparent


def test_what_a_kernel_reads_or_the_step_returns_is_not_transparent() -> None:
    b = Builder()
    product = b.op([b.argument(100)], 100)
    read, returned = (b.op([product], 100, "elementwise") for _ in range(2))
    graph = b.build(b.op([read], 100), returned)
    assert layout_of(graph, 50, finely=True).transparent == set()


def test_long_chains_of_elementwise_work_are_decided_about_now_and_then() -> None:
    b = Builder()
    last = b.op([b.argument(100)], 100)
    for _ in range(3000):
        last = b.op([last], 100, "elementwise")
    layout = layout_of(b.build(b.op([last], 1, "reduction")), 50, finely=True)
    decided = [op - 1 for op in range(1, 3001) if op not in layout.transparent]
    assert decided == list(range(16, 3000, 17))
    unfold(layout, {})


def test_a_dropped_value_is_made_again_in_the_segment_that_reads_it() -> None:
    graph = training_chain([10, 10])  # values: 0 argument, 1 and 2 forward, 3 loss, 4 and 5 backward
    layout = layout_of(graph)
    actions, origins = unfold(layout, {(1, 3): Mode.DROP})
    assert origins == (0, 1, 2, 3, 3, 4)  # the second forward operation and the backward one are both heavy
    assert runs(actions)[0] == 2
    assert accepted(graph, actions).recomputed == {0: 1}


def test_an_offloaded_value_leaves_behind_its_last_reader_and_returns_a_segment_early() -> None:
    graph = training_chain([10] * 5)
    layout = layout_of(graph)
    user = layout.home[10]  # the backward operation that reads value 1
    assert 1 in layout.reads[user]
    segments = list(Plan(unfold(layout, {(1, user): Mode.OFFLOAD})[0], "", "").segments())
    where = {a.kind: n for n, actions in enumerate(segments) for a in actions if a.target == 1 and a.kind is not C}
    assert where == {OUT: 0, F: user, IN: user - 1, R: user}
    assert [n for n, actions in enumerate(segments) if Action(F, 1) in actions] == [1, user]


def test_offloading_across_no_segment_still_leaves_and_returns_in_order() -> None:
    graph = chain(3)
    for mode in (Mode.OFFLOAD, Mode.OFFLOAD_NOW):
        actions, _ = unfold(layout_of(graph), {(1, 1): mode})
        assert [a.kind for a in actions if a.target == 1 and a.kind is not C] == [OUT, F, IN, F, R]


def test_siblings_of_a_dropped_value_are_made_again_with_it() -> None:
    b = Builder()
    left, right = b.ops_of([b.argument(10)], [10, 10])
    middle = b.op([left, right], 10)
    last = b.op([middle, left, right], 10)
    layout = layout_of(b.build(last))
    assert layout.reads[2] == {left, right, middle}
    demand = Demand.of(layout, {(left, 2): Mode.DROP})
    assert demand.again[2] == {0} and demand.uses[left] == demand.uses[right] == [1]
    actions, _ = unfold(layout, {(left, 2): Mode.DROP})
    accepted(layout.graph, actions)
    assert runs(actions)[0] == 2


@pytest.mark.parametrize(("kept", "fuses_rows", "again"), [(1, True, 2), (1, False, 0), (5, True, 0)])
def test_statistics_of_rows_are_made_again_where_the_rows_are(kept: int, fuses_rows: bool, again: int) -> None:
    """Not where only what was made with them is."""
    b = Builder()
    scores = b.op([b.argument(1)], 10)
    largest = b.op([scores], 1, "reduction", along_rows=True)
    positive = b.op([largest], 1, "elementwise")
    b.op([scores, positive], 10, "elementwise")
    weights = b.op([scores, positive], 10, "elementwise")
    assert (scores, weights) == (1, 5)
    later = b.op([b.op([weights], 1), kept, positive], 1)
    layout = layout_of(b.build(later), fuses_rows=fuses_rows)
    assert layout.fleeting == ({largest, positive} if fuses_rows else set())
    actions, _ = unfold(layout, {})
    accepted(layout.graph, actions)
    assert sum(runs(actions)[op] - 1 for op in range(5)) == again


def test_a_chain_longer_than_the_stack_is_dropped_whole() -> None:
    graph = training_chain([1] * 1500)
    layout = layout_of(graph)
    user = layout.home[graph.ops[graph.readers[1498][-1]].outputs[0]]  # far behind all that it needs
    actions, _ = unfold(layout, {(value, user): Mode.DROP for value in range(1, 1499)})
    assert len(accepted(graph, actions).recomputed) == 1498


@pytest.mark.parametrize("graph", [Builder().build(), chain(0), chain(3, fusion="view")], ids=["empty", "id", "views"])
def test_steps_without_operations(graph: Graph) -> None:
    layout = layout_of(graph)
    accepted(graph, unfold(layout, {})[0])


def test_diamond_in_full() -> None:
    actions, origins = unfold(layout_of(diamond()), {})
    assert [(a.kind, a.target) for a in actions if a.kind is not Kind.FENCE] == [
        (C, 0), (C, 1), (C, 2), (F, 1), (C, 3), (F, 2), (F, 3),
    ]  # fmt: skip
    assert origins == (0, 1, 2, 3)
