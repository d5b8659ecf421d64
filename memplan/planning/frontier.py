"""Where sizes stop to fit: few trials, aimed by what is known without them."""

from __future__ import annotations

from collections.abc import Callable

_AIMED = 4  # trials by what the last one needed; from then on the range is halved
_Bytes = Callable[[int], int]
_Trial = Callable[[int, bool], tuple[bool, int]]


def last_fitting(count: int, budget_bytes: int, floor: _Bytes, predicted: _Bytes, trial: _Trial) -> int:
    """The last of the sizes 0 .. count - 1 that fits, where every smaller one does too; -1 where none does.

    Of what it returns, a trial has fitted, and a thorough one of the next has not.

    Args:
      floor: bytes below which a size cannot go; rises with the size. Cheap.
      predicted: bytes that a size is expected to need. Asked once.
      trial: (size, thorough) -> does it fit, and the least bytes that it was seen to need. Dear, a thorough one even
        more; one that is not may miss what fits.
    """
    below = _aimed(count, budget_bytes, floor, predicted, lambda size: trial(size, False))
    return _proved(count, below, lambda size: trial(size, True)[0])


def _aimed(
    count: int, budget_bytes: int, floor: _Bytes, predicted: _Bytes, trial: Callable[[int], tuple[bool, int]]
) -> int:
    """The last size that fits at the first try, aimed at by what the last one needed."""

    def last_below(most: float) -> int:
        return _last(count, below, above, floor, most)

    below, above, trials = -1, count, 0  # fits; does not
    first = max(0, last_below(budget_bytes))
    share = _share(predicted(first), floor(first))
    while above - below > 1:
        aimed, halved = last_below(budget_bytes / share), (below + above) // 2
        size = min(max(aimed, below + 1), above - 1) if trials < _AIMED else halved
        fits, needed = trial(size)
        below, above = (size, above) if fits else (below, size)
        share, trials = _share(needed, floor(size)), trials + 1
    return below


def _proved(count: int, below: int, fits: Callable[[int], bool]) -> int:
    """The last size that fits, from one that does: mostly it is that one, so steps begin small and double."""
    above, reach = count, 1
    while above - below > 1:
        size = min(below + reach, above - 1) if above == count else (below + above) // 2
        below, above = (size, above) if fits(size) else (below, size)
        reach *= 2
    return below


def _last(count: int, below: int, above: int, floor: _Bytes, most: float) -> int:
    """The last size between whose floor is at most that, by halving; `below` where there is none.

    Always along the same tree of halves, so that most floors are known from the time before.
    """
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        if middle <= below or (middle < above and floor(middle) <= most):
            low = middle
        else:
            high = middle
    return max(low, below)


def _share(needed: int, floor: int) -> float:
    """How much more than its floor a size takes; at least as much."""
    return max(1.0, needed / max(1, floor))
