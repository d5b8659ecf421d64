"""The running order respects dependencies, effects and donated buffers, and runs loose ends at once."""

from __future__ import annotations

import random

from hypothesis import given, settings

from memplan.planning.graph import Graph
from memplan.planning.order import early_loose_ends
from tests.planning.graphs import DRAWS, Builder, chain, diamond, fan_out, random_graph, training_stack


def positions(graph: Graph) -> list[int]:
    order = early_loose_ends(graph)
    assert sorted(order) == list(range(len(graph.ops)))
    return [order.index(op) for op in range(len(graph.ops))]


def buffer_readers(graph: Graph, value: int) -> set[int]:
    """Operations that read a value, or a view of it."""
    found = set(graph.readers[value])
    for reader in graph.readers[value]:
        if graph.ops[reader].fusion == "view":
            found.update(*(buffer_readers(graph, made) for made in graph.ops[reader].outputs))
    return found


@settings(max_examples=150, deadline=None)
@given(DRAWS)
def test_order_is_legal(draw: random.Random) -> None:
    graph = random_graph(draw)
    at = positions(graph)
    for number, op in enumerate(graph.ops):
        assert all(at[made] < at[number] for value in op.inputs if (made := graph.producer[value]) is not None)
    effects = [at[number] for number, op in enumerate(graph.ops) if not op.recomputable]
    assert effects == sorted(effects)
    for output, argument in graph.reused.items():
        update = graph.producer[output]
        assert update is not None
        readers = [reader for reader in buffer_readers(graph, argument) if reader < update]
        assert all(at[reader] < at[update] for reader in readers)


def test_programs_without_loose_ends_keep_their_order() -> None:
    for graph in (chain(5), diamond(), fan_out(4)):
        assert early_loose_ends(graph) == tuple(range(len(graph.ops)))
    assert early_loose_ends(Builder().build()) == ()


def test_a_loose_end_runs_as_soon_as_it_can() -> None:
    b = Builder()
    x = b.argument(1)
    first = b.op([x], 1)
    second = b.op([first], 1)
    third = b.op([second], 1)
    slope = b.op([first, x], 1)  # a kernel that feeds only an update
    update = b.op([slope, x], 1, "elementwise")
    assert early_loose_ends(b.build(third, update)) == (0, 3, 4, 1, 2)
    # a metric on the way, written last, moves forward
    b = Builder()
    x = b.argument(1)
    first = b.op([x], 1)
    second = b.op([b.op([first], 1)], 1)
    metric = b.op([first], 1, "reduction")
    assert early_loose_ends(b.build(second, metric)) == (0, 3, 1, 2)


def test_updates_run_where_their_gradients_are_ready() -> None:
    graph = training_stack(4)
    order = early_loose_ends(graph)
    names = [graph.ops[op].name for op in order]
    backward = names[names.index("loss") + 1 :]
    # an update waits for the input gradient, which still reads the weights that it overwrites
    later = backward.index("update")
    assert backward[:later].count("input_gradient") == 1
    assert backward[:later].count("weight_gradient") == 1


def test_what_reads_only_arguments_runs_right_before_it_is_needed() -> None:
    b = Builder()
    moment, x = b.argument(1), b.argument(1)
    decayed = b.op([moment], 1, "elementwise")
    slope = b.op([b.op([x], 1)], 1)
    unused = b.op([moment, x], 1, "elementwise")
    update = b.op([decayed, slope], 1, "elementwise")
    assert early_loose_ends(b.build(update, unused)) == (1, 2, 0, 4, 3)


def test_effects_are_never_loose() -> None:
    b = Builder()
    x = b.argument(1)
    first = b.op([x], 1)
    last = b.op([b.op([first], 1)], 1)
    b.op([first], 1, "elementwise", recomputable=False, why_not="it prints")
    assert early_loose_ends(b.build(last)) == (0, 1, 2, 3)


def test_a_view_of_an_argument_is_read_before_the_update_takes_its_buffer() -> None:
    b = Builder()
    weight = b.argument(4, donated=True)
    turned = b.op([weight], 4, "view")
    gradient = b.op([b.argument(4)], 4)
    reader = b.op([gradient, turned], 9)
    update = b.op([weight, gradient], 4, "elementwise")
    graph = b.build(b.op([reader], 9), update)
    order = early_loose_ends(graph)
    assert order.index(2) < order.index(3)
