"""Of two solutions the better."""

from __future__ import annotations

from memplan.planning.solution import Solution, rank


def test_what_fits_then_what_is_fast_then_what_is_small() -> None:
    fast, slow = (Solution((), 8, took_s, 0, 1.0, fits=True) for took_s in (2.0, 3.0))
    small, large = (Solution((), nbytes, 1.0, 0, 1.0, fits=False) for nbytes in (9, 10))
    assert sorted([large, slow, small, fast], key=rank) == [fast, slow, small, large]
