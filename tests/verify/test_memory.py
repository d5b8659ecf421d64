"""Predicted against compiled bytes, and whose buffers stand at the peak."""

from __future__ import annotations

from memplan.planning.graph import Graph, Op, Value
from memplan.program.hlo import Buffer, Schedule
from memplan.xla.target import Executable, Memory
from memplan.verify.memory import excess, standing_at_peak

GRAPH = Graph(
    values=(
        Value("x", 100, role="argument"),
        Value("dot:1", 400),
        Value("sin:2", 400),
        Value("sum:3", 4),
    ),
    ops=(
        Op("dot_general", (0,), (1,), source="model.py:3"),
        Op("sin", (1,), (2,), source="model.py:4"),
        Op("reduce_sum", (2,), (3,), scope="loss"),
    ),
    inputs=(0,),
    outputs=(3,),
)


def executable(*buffers: Buffer, **marks: tuple[int, int]) -> Executable:
    schedule = Schedule(("first", "second"), buffers, marks, {"plain": "jit(step)/scatter"})
    return Executable(None, Memory(0, 0, 0, 0, 0, 0), schedule)


def buffer(name: str, nbytes: int, **where: bool) -> Buffer:
    return Buffer(name, nbytes, 0, 1, **{"temporary": True, "on_host": False, **where})


def test_only_what_is_beyond_the_prediction_counts() -> None:
    assert excess([100, 200, 300], [7, 8, 9], {0: 150, 1: 200, 2: 10}) == {7: 50}


def test_the_worst_segment_of_an_operation_counts() -> None:
    assert excess([100, 100], [7, 7], {0: 110, 1: 130}) == {7: 30}


def test_segments_nobody_predicted_are_left_out() -> None:
    assert excess([100], [7], {3: 900}) == {}


def test_buffers_are_values_with_lines_largest_first() -> None:
    rows = standing_at_peak(executable(buffer("fusion{0}", 400), fusion=(0, 1)), GRAPH)
    assert [(row.name, row.nbytes, row.source, row.value) for row in rows] == [
        ("sin:2", 400, "model.py:4", 2),
        ("x", 100, "argument", 0),
    ]


def test_a_buffer_of_a_fusion_is_the_value_with_its_bytes() -> None:
    # The fusion is marked as the sum, but this result of it is as large as a sine that was fused with it.
    rows = standing_at_peak(executable(buffer("fusion{1}", 400), fusion=(0, 2), sin=(0, 1), dot=(0, 0)), GRAPH)
    assert rows[0].name == "sin:2"


def test_values_of_other_segments_are_not_mistaken_for_it() -> None:
    rows = standing_at_peak(executable(buffer("fusion{1}", 400), fusion=(1, 2), sin=(0, 1)), GRAPH)
    assert (rows[0].name, rows[0].source) == ("sum:3", "loss")


def test_what_the_compiler_made_for_itself_keeps_its_name() -> None:
    rows = standing_at_peak(executable(buffer("plain", 40), buffer("copy.7{}", 30)), GRAPH)
    assert [(row.name, row.value) for row in rows] == [("x", 0), ("jit(step)/scatter", -1), ("copy.7{}", -1)]


def test_the_host_and_what_is_not_temporary_do_not_stand() -> None:
    rows = standing_at_peak(executable(buffer("h", 400, on_host=True), buffer("a", 400, temporary=False)), GRAPH)
    assert [row.name for row in rows] == ["x"]


def test_no_more_rows_than_asked_for() -> None:
    buffers = [buffer(f"b{number}", number + 1) for number in range(40)]
    assert len(standing_at_peak(executable(*buffers), GRAPH, most=5)) == 5


def test_a_backend_that_tells_nothing() -> None:
    assert standing_at_peak(Executable(None, Memory(0, 0, 0, 0, 0, 0), None), GRAPH) == ()
