"""The roofline, added up by hand on a device where everything takes a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.hardware.catalog import named
from memplan.hardware.roofline import copy_seconds, kernel_seconds
from memplan.planning.graph import Graph, Op, Value, op_seconds
from tests.planning.unit import UNIT

TWICE = replace(UNIT, flops={"float32": 2.0}, vector_flops=0.5, memory_bandwidth=4.0)


def test_the_slower_of_compute_and_memory_counts() -> None:
    assert kernel_seconds(8, "float32", 4, TWICE) == 4
    assert kernel_seconds(8, "float32", 40, TWICE) == 10
    assert kernel_seconds(8, "", 4, TWICE) == 16
    assert kernel_seconds(0, "", 0, TWICE) == 0


def test_an_operation_reads_each_input_once_and_writes_its_outputs() -> None:
    values = tuple(Value(f"v{nbytes}", nbytes) for nbytes in (3, 5, 7, 11))
    op = Op("op", (0, 1, 0), (2, 3), traffic_nbytes=100)
    assert op_seconds(Graph(values, (op,)), op, UNIT) == 3 + 5 + 7 + 11 + 100


def test_views_cost_nothing() -> None:
    view = Op("view", (0,), (1,), flops=100.0, fusion="view")
    assert op_seconds(Graph((Value("a", 3), Value("b", 9)), (view,)), view, UNIT) == 0


def test_copies_pay_latency_once() -> None:
    v100 = named("v100")
    assert copy_seconds(0, v100) == v100.link.latency_s
    assert copy_seconds(10**9, v100) == pytest.approx(v100.link.latency_s + 1e9 / v100.link.bandwidth)
