"""The floor, by hand, and below every simulated plan."""

from __future__ import annotations

import random

from hypothesis import given, settings

from memplan.planning.floor import floor
from memplan.planning.plan import Plan
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import unfold
from tests.planning.graphs import DRAWS, UNIT, Builder, chain, layout_of, random_decisions, random_graph


def test_the_largest_kernel_sets_the_floor() -> None:
    b = Builder()
    x = b.argument(1)
    small = b.op([x], 10)
    large = b.op([small], 20, workspace_nbytes=5)
    last = b.op([large], 3)
    found = floor(b.build(last))
    assert (found.nbytes, found.op) == (1 + 3 + 10 + 20 + 5, 1)


def test_only_kernels_count() -> None:
    b = Builder()
    x = b.argument(1)
    b.op([b.op([x], 1000, "elementwise")], 1, "reduction")
    assert floor(b.build(2)).op == -1
    assert floor(b.build(2)).nbytes == 2
    assert floor(Builder().build()) == floor(Builder().build())
    assert floor(chain(0, nbytes=7)).nbytes == 7


def test_outputs_are_counted_once_and_donated_buffers_not_again() -> None:
    b = Builder()
    x = b.argument(10, donated=True)
    made = b.op([x], 10)
    assert floor(b.build(made)).nbytes == 10
    assert floor(b.build(made, made)).nbytes == 10
    assert floor(b.build(x, made)).nbytes == 20


def test_a_kernel_may_write_into_the_output_that_views_it() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10)
    view = b.op([b.op([made], 10, "view")], 10, "view")
    assert floor(b.build(view)).nbytes == 11


def test_broadcasts_that_a_kernel_reads_need_no_buffer() -> None:
    b = Builder()
    wide = b.op([b.op([b.argument(1)], 2)], 1000, "view")
    assert floor(b.build(b.op([wide], 3))).nbytes == 1 + 3 + 2


@settings(max_examples=150, deadline=None)
@given(DRAWS)
def test_no_simulated_plan_goes_below_the_floor(draw: random.Random) -> None:
    graph = random_graph(draw)
    layout = layout_of(graph, draw.choice([1, 15, 1000]))
    actions, _ = unfold(layout, random_decisions(draw, layout))
    assert Simulator(graph, UNIT).run(Plan(actions, "", "")).peak_nbytes >= floor(graph).nbytes
