"""Seconds of one operation, on a device where everything takes a second."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.graph import Graph, Op, Rows, Value, op_seconds
from tests.planning.unit import UNIT


def test_an_operation_reads_each_input_once_and_writes_its_outputs() -> None:
    values = tuple(Value(f"v{nbytes}", nbytes) for nbytes in (3, 5, 7, 11))
    op = Op("op", (0, 1, 0), (2, 3), traffic_nbytes=100)
    assert op_seconds(Graph(values, (op,)), op, UNIT) == 3 + 5 + 7 + 11 + 100


def test_views_cost_nothing() -> None:
    view = Op("view", (0,), (1,), flops=100.0, fusion="view")
    assert op_seconds(Graph((Value("a", 3), Value("b", 9)), (view,)), view, UNIT) == 0


ROWS = st.builds(Rows, st.integers(1, 4), st.integers(1, 4), st.integers(-5, 5), st.integers(1, 6))
SPANS = st.tuples(st.integers(-6, 6), st.integers(1, 8)).map(
    lambda start_and_length: (start_and_length[0], start_and_length[0] + start_and_length[1])
)


def read(rows: Rows, low: int, high: int) -> set[int]:
    """Rows of the operand at positions that the window goes over."""
    positions = {
        i * rows.stride - rows.before + more for i in range(low, high) for more in range(rows.reach)
    }
    return {position // rows.dilation for position in positions if position % rows.dilation == 0}


def between(rows: Rows, low: int, high: int) -> set[int]:
    """Rows from the window's first position to its last: with a large stride it jumps over some."""
    first = low * rows.stride - rows.before
    last = (high - 1) * rows.stride - rows.before + rows.reach
    return {
        position // rows.dilation
        for position in range(first, last)
        if position % rows.dilation == 0
    }


@given(ROWS, SPANS)
def test_the_rows_of_a_span(rows: Rows, span: tuple[int, int]) -> None:
    first, last = rows.of(*span)
    assert first < last
    wanted = between(rows, *span)
    assert read(rows, *span) <= wanted
    assert set(range(first, last)) == wanted if wanted else last == first + 1


@given(ROWS, ROWS, SPANS)
def test_the_rows_of_another_operands_rows(rows: Rows, inner: Rows, span: tuple[int, int]) -> None:
    chained = Rows(rows.stride, rows.dilation, rows.before, rows.reach, via=inner)
    assert chained.of(*span) == rows.of(*inner.of(*span))
    assert chained.scale == rows.scale * inner.scale


@given(ROWS, st.integers(1, 8), st.integers(1, 8))
def test_what_leaves_an_operand(rows: Rows, result_rows: int, operand_rows: int) -> None:
    positions = between(rows, 0, result_rows)
    if positions:
        is_outside = min(positions) < 0 or max(positions) >= operand_rows
        assert rows.reads_padding(result_rows, operand_rows) == is_outside


def test_rows_of_the_operand_per_row_of_the_result() -> None:
    assert (Rows(2, 1, 0, 2).scale, Rows(1, 2, 1, 2).scale) == (2, Fraction(1, 2))
