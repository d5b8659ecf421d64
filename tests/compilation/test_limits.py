"""Bytes that a step may take, and what is left free of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.compilation.limits import Headroom, Limits, rank

LIMITS = Limits(100, 50)
nbytes = st.integers(0, 2**40)


def test_both_memories_are_limited() -> None:
    assert LIMITS.allow(100, 50)
    assert not LIMITS.allow(101, 0) and not LIMITS.allow(0, 51)


@given(nbytes, nbytes)
def test_what_is_beyond_the_limits_is_what_does_not_fit(device: int, host: int) -> None:
    assert LIMITS.excess(device, host) == max(device - 100, 0) + max(host - 50, 0)
    assert LIMITS.allow(device, host) == (LIMITS.excess(device, host) == 0)


@given(nbytes, nbytes, nbytes, nbytes)
def test_a_reserve_grows_by_what_was_missed_and_by_no_more(
    device: int, host: int, took: int, took_host: int
) -> None:
    limits = Limits(device, host)
    grown = Headroom(1, 2).after_miss(limits, (device, host), (took, took_host))
    assert limits.allow(took - (grown.device_bytes - 1), took_host - (grown.host_bytes - 2))
    assert (grown == Headroom(1, 2)) == limits.allow(took, took_host)


@given(nbytes, nbytes, nbytes)
def test_with_the_reserve_of_a_miss_the_same_plan_is_too_large(
    limit: int, room: int, error: int
) -> None:
    predicted = limit - room
    limits, compiled = Limits(limit, 0), predicted + error
    reserve = Headroom().after_miss(limits, (predicted, 0), (compiled, 0)).device_bytes
    assert (predicted > limit - reserve) == (compiled > limit)
    assert reserve == (error if compiled > limit else 0)


def test_candidates_that_fit_come_first_then_the_smallest() -> None:
    fitting, small, large = (
        rank(True, 9.0, 90, 9),
        rank(False, 1.0, 110, 1),
        rank(False, 0.5, 120, 1),
    )
    assert sorted([large, small, fitting]) == [fitting, small, large]


@given(st.floats(1e-6, 1e3), st.floats(1.011, 10), st.integers(0, 99), st.integers(0, 99))
def test_the_faster_candidate_wins_by_more_than_a_tie(
    seconds: float, times: float, actions: int, others: int
) -> None:
    assert rank(True, seconds, 1, actions) < rank(True, seconds * times, 1, others)


@given(st.floats(1e-6, 1e3), st.integers(0, 99), st.integers(0, 99))
def test_of_equally_fast_candidates_the_one_that_does_less_wins(
    seconds: float, actions: int, others: int
) -> None:
    ranks = rank(True, seconds, 1, actions), rank(True, seconds, 2, others)
    assert (ranks[0] < ranks[1]) == (actions < others)


def test_a_tie_is_half_a_percent() -> None:
    """Seconds in the middle of those that count as equal."""
    middle = 1.005**100
    assert rank(True, middle * 1.002, 1, 5) < rank(True, middle * 0.998, 1, 6)
    assert rank(True, middle, 1, 6) < rank(True, middle * 1.006, 1, 5)
    assert rank(True, 0.0, 1, 6) < rank(True, 1e-9, 1, 5)
