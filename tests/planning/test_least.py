"""The lower bound against plans: what fits is never faster, and small cases come out as added up by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from memplan.planning import devices
from memplan.planning.graph import Graph
from memplan.planning.least import least_seconds, passes_seconds
from memplan.planning.plan import Plan
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import unfold
from memplan.verify.plan import judge
from tests.planning.graphs import DRAWS, UNIT, Builder, layout_of, random_decisions, random_graph

MATRIX: Any = {"name": "dot_general", "flops_dtype": "float32"}
AMPERE = replace(UNIT, target=devices.named("a100").target)
ROOM = 10**9


def with_matrix_work(graph: Graph, draw: random.Random) -> Graph:
    """The same, its kernels being products of some FLOPs."""
    ops = [replace(op, flops=draw.randrange(200), **MATRIX) if op.fusion == "kernel" else op for op in graph.ops]
    return replace(graph, ops=tuple(ops))


def training(layers: int, flops: float) -> Graph:
    """Products forward, then backward, each of which reads its layer's input: 10 bytes each."""
    b = Builder()
    values = [b.argument(10)]
    for _ in range(layers):
        values.append(b.op([values[-1]], 10, flops=flops, **MATRIX))
    back = b.op([values[-1]], 10, flops=flops, **MATRIX)
    for value in reversed(values[:-1]):
        back = b.op([back, value], 10, flops=flops, **MATRIX)
    return b.build(back)


@settings(max_examples=150, deadline=None)
@given(DRAWS)
def test_no_plan_is_faster(draw: random.Random) -> None:
    graph = with_matrix_work(random_graph(draw), draw)
    for device in (UNIT, AMPERE):
        layout = layout_of(graph, fuses_rows=device is AMPERE)
        actions, _ = unfold(layout, random_decisions(draw, layout))
        plan = Plan(actions, graph.fingerprint, "")
        judge(plan, graph)
        timeline = Simulator(graph, device).run(plan)
        least = least_seconds(graph, device, timeline.peak_nbytes, timeline.host_peak_nbytes)
        assert least <= timeline.step_s * (1 + 1e-6) + 1e-9


def test_with_room_the_work_itself_is_the_bound() -> None:
    assert least_seconds(training(4, 50.0), UNIT, ROOM, 0) == pytest.approx(9 * 50.0)


def test_what_has_no_room_is_computed_again() -> None:
    """As the first product of the way back runs, four values are wanted beside argument and output."""
    graph = training(4, 50.0)
    assert least_seconds(graph, UNIT, 20 + 50, 0) == pytest.approx(9 * 50.0)
    assert least_seconds(graph, UNIT, 20 + 40, 0) == pytest.approx(10 * 50.0)
    assert least_seconds(graph, UNIT, 20 + 30, 0) == pytest.approx(11 * 50.0)


def test_moving_costs_no_computation_but_the_link() -> None:
    graph = training(4, 50.0)
    assert least_seconds(graph, UNIT, 50, ROOM) == pytest.approx(9 * 50.0)
    slow = replace(UNIT, link=replace(UNIT.link, bandwidth=0.01))
    assert 9 * 50.0 < least_seconds(graph, slow, 50, ROOM) <= 11 * 50.0


def test_what_may_not_run_again_is_not() -> None:
    graph = training(4, 50.0)
    once = replace(graph, ops=tuple(replace(op, recomputable=False) for op in graph.ops))
    least = least_seconds(once, UNIT, 20 + 30, 0)  # nothing fits, which is not for the bound to say
    assert least == pytest.approx(9 * 50.0)


def test_passes_that_wait_for_each_other_are_counted_apart_where_nothing_fuses_them() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10, **MATRIX)
    mean = b.op([made], 1, "reduction")
    centered = b.op([made, mean], 10, "elementwise")
    variance = b.op([centered], 1, "reduction")
    normal = b.op([centered, variance], 10, "elementwise")
    graph = b.build(b.op([normal], 1, **MATRIX))
    # mean, variance and the operand read 10 bytes each; the operand is written, 10 more
    assert passes_seconds(graph, UNIT) == 40
    assert passes_seconds(graph, AMPERE) == 10


def test_passes_that_read_the_same_at_once_are_one() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10, **MATRIX)
    one, other = b.op([made], 1, "reduction"), b.op([b.op([made], 10, "elementwise")], 1, "reduction")
    assert passes_seconds(b.build(one, other), UNIT) == 10


def test_what_could_be_the_epilogue_of_a_product_is_not_counted() -> None:
    b = Builder()
    made = b.op([b.argument(1)], 10, **MATRIX)
    assert passes_seconds(b.build(b.op([b.op([made], 10, "elementwise")], 1, **MATRIX)), UNIT) == 0


def test_work_that_nobody_reads_is_not_counted() -> None:
    b = Builder()
    x = b.argument(10)
    b.op([x], 1, flops=100.0, **MATRIX)
    b.op([x], 1, "reduction")
    assert least_seconds(b.build(b.op([x], 1, flops=17.0, **MATRIX)), UNIT, ROOM, 0) == 17.0


def test_the_same_work_twice_is_counted_once() -> None:
    b = Builder()
    x = b.argument(10)
    one, other = b.op([x], 1, flops=17.0, **MATRIX), b.op([x], 1, flops=17.0, **MATRIX)
    assert least_seconds(b.build(one, other), UNIT, ROOM, 0) == 17.0
