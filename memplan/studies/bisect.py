"""Where sizes stop to fit: by halving, since what a size needs rises with it."""

from __future__ import annotations

from collections.abc import Callable


def last_fitting(count: int, fits: Callable[[int], bool]) -> int:
    """The last of the sizes 0 .. count - 1 that fits, where every smaller one does too; -1 where none does.

    It has been tried, and so has the next one, which did not fit.
    """
    below, above = -1, count
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below
