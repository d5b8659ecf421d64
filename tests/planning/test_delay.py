"""Elementwise work behind the fences inside a segment."""

from __future__ import annotations

import random

from hypothesis import given, settings

from memplan.planning.delay import delayed
from tests.planning.graphs import DRAWS, Builder, layout_of, random_graph


def test_work_that_grows_waits_behind_the_fence() -> None:
    b = Builder()
    x = b.argument(1)
    first = b.op([x], 10)  # 0
    wide = b.op([first], 40, "elementwise")  # 1
    second = b.op([x], 10)  # 2
    layout = layout_of(b.build(b.op([wide, second], 1)))  # 3
    assert delayed(layout, [0, 1, 2, 3], ()) == [0, 2, 1, 3]


def test_work_that_shrinks_is_done_before_it() -> None:
    b = Builder()
    x = b.argument(1)
    first = b.op([x], 10)
    narrow = b.op([first], 4, "elementwise")
    second = b.op([x], 10)
    layout = layout_of(b.build(b.op([narrow, second], 1)))
    assert delayed(layout, [0, 1, 2, 3], ()) == [0, 1, 2, 3]
    assert delayed(layout, [0, 1, 2, 3], {first}) == [0, 2, 1, 3]  # what it reads stays in any case


def test_what_the_next_kernel_reads_stays_before_it() -> None:
    b = Builder()
    first = b.op([b.argument(1)], 10)
    wide = b.op([first], 40, "elementwise")
    layout = layout_of(b.build(b.op([wide], 10), b.op([wide], 1, "elementwise")))
    assert delayed(layout, [0, 1, 2, 3], ()) == [0, 1, 2, 3]


def test_chains_wait_as_a_whole_and_behind_every_fence() -> None:
    b = Builder()
    x = b.argument(1)
    wide = b.op([b.op([x], 10)], 40, "elementwise")
    wider = b.op([wide], 50, "elementwise")
    kernels = [b.op([x], 1), b.op([x], 1)]
    layout = layout_of(b.build(b.op([wider, *kernels], 1)))
    assert delayed(layout, [0, 1, 2, 3, 4, 5], ()) == [0, 3, 4, 1, 2, 5]


@settings(max_examples=100, deadline=None)
@given(DRAWS)
def test_everything_still_runs_once_after_what_it_reads(draw: random.Random) -> None:
    graph = random_graph(draw, most=25)
    layout = layout_of(graph)
    ops = [op for segment in layout.segments for op in segment]
    order = delayed(layout, ops, {value for value in layout.home if draw.random() < 0.3})
    assert sorted(order) == sorted(ops)
    place = {op: position for position, op in enumerate(order)}
    for op in order:
        for value in layout.carriers[op]:
            made = graph.producer[value]
            assert made is None or place[made] < place[op]
