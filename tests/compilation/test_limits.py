"""Bytes that a step may take, and what is left free of them."""

from __future__ import annotations

from memplan.compilation.limits import Limits, Reserve

LIMITS = Limits(100, 50)


def test_both_memories_are_limited() -> None:
    assert LIMITS.allow(100, 50)
    assert not LIMITS.allow(101, 0) and not LIMITS.allow(0, 51)


def test_a_reserve_grows_by_what_was_missed_and_never_shrinks() -> None:
    assert Reserve(3, 4).grown(LIMITS, 107, 40) == Reserve(10, 4)
    assert Reserve(3, 4).grown(LIMITS, 90, 52) == Reserve(3, 6)
