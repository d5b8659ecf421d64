"""The roofline, added up by hand on a device where everything takes a second."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from memplan.planning.cost import copy_seconds, kernel_seconds, op_seconds, seconds
from memplan.planning.devices import named
from tests.planning.graphs import DRAWS, UNIT, Builder, random_graph

TWICE = replace(UNIT, flops={"float32": 2.0}, vector_flops=0.5, memory_bandwidth=4.0)


def test_the_slower_of_compute_and_memory_counts() -> None:
    assert kernel_seconds(8, "float32", 4, TWICE) == 4
    assert kernel_seconds(8, "float32", 40, TWICE) == 10
    assert kernel_seconds(8, "", 4, TWICE) == 16
    assert kernel_seconds(0, "", 0, TWICE) == 0


def test_an_operation_reads_each_input_once_and_writes_its_outputs() -> None:
    b = Builder()
    x, y = b.argument(3), b.argument(5)
    b.ops_of([x, y, x], [7, 11], traffic_nbytes=100)
    graph = b.build(2)
    assert op_seconds(graph, graph.ops[0], UNIT) == 3 + 5 + 7 + 11 + 100


def test_views_cost_nothing() -> None:
    b = Builder()
    view = b.op([b.argument(3)], 9, "view", flops=100.0)
    kernel = b.op([view], 2)
    graph = b.build(kernel)
    assert op_seconds(graph, graph.ops[0], UNIT) == 0
    assert seconds(graph, [0, 1, 1], UNIT) == 22


def test_copies_pay_latency_once() -> None:
    v100 = named("v100")
    assert copy_seconds(0, v100) == v100.link.latency_s
    assert copy_seconds(10**9, v100) == pytest.approx(v100.link.copy_s(10**9))


@given(DRAWS)
def test_nothing_is_faster_than_its_memory_or_its_arithmetic(draw: random.Random) -> None:
    graph = random_graph(draw)
    for op in graph.ops:
        taken = op_seconds(graph, op, TWICE)
        if op.fusion != "view":
            assert taken >= sum(map(graph.nbytes, op.outputs)) / 4 and taken >= op.flops / 0.5
