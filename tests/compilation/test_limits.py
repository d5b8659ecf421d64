"""Bytes that a step may take, and what is left free of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.compilation.limits import Headroom, Limits

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
    grown = Headroom(1, 2).plus_overshoot(limits, took, took_host)
    assert limits.allow(took - (grown.device_bytes - 1), took_host - (grown.host_bytes - 2))
    assert (grown == Headroom(1, 2)) == limits.allow(took, took_host)
