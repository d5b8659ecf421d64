"""Seconds of one operation, on a device where everything takes a second."""

from __future__ import annotations

from memplan.planning.graph import Graph, Op, Value, op_seconds
from tests.planning.unit import UNIT


def test_an_operation_reads_each_input_once_and_writes_its_outputs() -> None:
    values = tuple(Value(f"v{nbytes}", nbytes) for nbytes in (3, 5, 7, 11))
    op = Op("op", (0, 1, 0), (2, 3), traffic_nbytes=100)
    assert op_seconds(Graph(values, (op,)), op, UNIT) == 3 + 5 + 7 + 11 + 100


def test_views_cost_nothing() -> None:
    view = Op("view", (0,), (1,), flops=100.0, fusion="view")
    assert op_seconds(Graph((Value("a", 3), Value("b", 9)), (view,)), view, UNIT) == 0
