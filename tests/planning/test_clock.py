"""The clock's copies wait for their link, and its gaps are those that trying every start finds."""

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.clock import Clock, Interval, first_gap, last_gap


@st.composite
def intervals(draw: st.DrawFn) -> list[Interval]:
    """Intervals of a link in whole seconds, in order."""
    busy: list[Interval] = []
    end = 0
    for _ in range(draw(st.integers(0, 6))):
        start = end + draw(st.integers(0, 4))
        end = start + draw(st.integers(1, 4))
        busy.append((float(start), float(end)))
    return busy


def is_free(busy: list[Interval], start: int, seconds: int) -> bool:
    return all(end <= start or start + seconds <= begin for begin, end in busy)


@given(intervals(), st.integers(0, 40), st.integers(1, 5))
def test_the_first_and_the_last_gap(busy: list[Interval], time: int, seconds: int) -> None:
    """Of all starts in whole seconds: the first from a time on, and the last that ends before it."""
    starts = [start for start in range(-10, 80) if is_free(busy, start, seconds)]
    assert first_gap(busy, time, seconds) == min(start for start in starts if start >= time)
    assert last_gap(busy, time, seconds) == max(s for s in starts if s + seconds <= time)


def test_copies_of_one_link_follow_each_other() -> None:
    """A copy starts when its link is free; another link does not wait; a late copy stalls kernels."""
    clock = Clock()
    clock.run(1)
    assert clock.copy("out", 3) == (1, 4)
    assert clock.copy("out", 2) == (4, 6)
    assert clock.copy("in", 2) == (1, 3)
    assert clock.wait(3) == 2 and clock.now_s == 3
    assert clock.wait(2) == 0 and clock.now_s == 3
    assert clock.stalls == [(1, 3)]
    assert clock.end_s == 6 and clock.free_s("in") == 3 and clock.free_s("net") == 0
