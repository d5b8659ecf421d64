"""Best fit, largest or longest first, added up by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.heap import Groups, heap_nbytes

Span = tuple[int, int, int]  # first event, last event, bytes


def groups(*spans: Span, together: Sequence[int] = ()) -> Groups:
    """Each in a place of its own, but for some that have one together."""
    place = {number: min(together) if number in together else number for number in range(len(spans))}
    columns = ({number: span[at] for number, span in enumerate(spans)} for at in range(3))
    return Groups.of(place, *columns)


def nbytes(found: Groups, alignment: int = 1) -> int:
    return heap_nbytes(found, range(len(found.start)), alignment)


def test_what_is_there_at_different_times_lies_in_one_place() -> None:
    assert nbytes(groups((0, 1, 5), (2, 3, 7))) == 7
    assert nbytes(groups((0, 2, 5), (2, 3, 7))) == 12


def test_the_smallest_gap_that_holds_it_is_taken() -> None:
    stacked = [(0, 9, 10), (0, 3, 8), (0, 9, 7), (0, 3, 5), (0, 9, 4)]  # gaps of 8 and of 5 once two have ended
    assert nbytes(groups(*stacked, (5, 9, 5), (6, 9, 8))) == 34
    assert nbytes(groups(*stacked, (5, 9, 3), (6, 9, 8), (7, 9, 2))) == 34


def test_places_are_aligned() -> None:
    assert nbytes(groups((0, 1, 5), (0, 1, 3)), alignment=4) == 8 + 3


def test_a_group_takes_its_largest_from_its_first_to_its_last() -> None:
    spans = (0, 1, 5), (2, 3, 8), (0, 3, 4)
    assert groups(*spans, together=(0, 1)).members == {0: [0, 1], 2: [2]}
    assert groups(*spans, together=(0, 1)).live_nbytes() == nbytes(groups(*spans, together=(0, 1))) == 12


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=12))
def test_no_less_than_is_live_and_no_more_than_all(drawn: list[Span]) -> None:
    events = sorted(range(2 * len(drawn)), key=lambda at: (drawn[at // 2][0] + at % 2 * drawn[at // 2][1], at % 2, at))
    clock = {event: time for time, event in enumerate(events)}
    found = groups(*((clock[2 * n], clock[2 * n + 1], size) for n, (_, _, size) in enumerate(drawn)))
    assert found.live_nbytes() <= nbytes(found) <= sum(size for *_, size in drawn)
