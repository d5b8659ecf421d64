"""One heap: where what shares no place with arguments and outputs goes, the largest or the longest first.

Source: XLA's `GlobalDecreasingSizeBestFitHeap`, the better of its two orders (`ChooseBestHeapAlgorithm`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Groups:
    """Versions that lie in one place of the heap, XLA's colocations."""

    members: dict[int, list[int]]  # of each group, by its first version
    # start, end: of versions, in events
    start: dict[int, int]
    end: dict[int, int]
    nbytes: dict[int, int]  # of groups

    @staticmethod
    def of(place: Mapping[int, int], start: dict[int, int], end: dict[int, int], nbytes: Mapping[int, int]) -> Groups:
        """Of versions: those with one place together, the first to start first."""
        together: dict[int, list[int]] = defaultdict(list)
        for number in sorted(place, key=start.__getitem__):
            together[place[number]].append(number)
        members = {numbers[0]: numbers for numbers in together.values()}
        sizes = {first: max(nbytes[n] for n in numbers) for first, numbers in members.items()}
        return Groups(members, start, end, sizes)

    def span(self, group: int) -> int:
        """Events from the start of a group to its end."""
        numbers = self.members[group]
        return max(self.end[n] for n in numbers) - min(self.start[n] for n in numbers)

    def own_span(self, group: int) -> int:
        """Minus the duration that ties of size go by: of the first version alone."""
        return self.start[group] - self.end[group]

    def live_nbytes(self) -> int:
        """Bytes that are there at once, at the most."""
        change = np.zeros(2 * len(self.start) + 2, np.int64)
        for group, numbers in self.members.items():
            until = 0
            for number in numbers:  # where one ends when the next has begun, the place is there once
                first, until = max(self.start[number], until), max(self.end[number], until)
                change[first] += self.nbytes[group]
                change[until] -= self.nbytes[group]
        return int(np.cumsum(change).max())


def heap_nbytes(groups: Groups, position: Sequence[int], alignment: int) -> int:
    """Bytes of the smaller of the two heaps; equals are placed by their position."""
    by_size = _best_fit(groups, lambda g: (-groups.nbytes[g], groups.own_span(g), position[g], g), alignment)
    return _best_fit(groups, lambda g: (-groups.span(g), -groups.nbytes[g], position[g], g), alignment, by_size)


def _best_fit(groups: Groups, key: Callable[[int], tuple[int, ...]], alignment: int, most: float = math.inf) -> int:
    """Bytes of the heap, its groups placed in the order of the key; or `most`, if that is less."""
    count = sum(map(len, groups.members.values()))
    start, end = (np.zeros(count, np.int32) for _ in range(2))
    low, high = (np.zeros(count, np.int64) for _ in range(2))
    placed = top = 0
    for group in sorted(groups.members, key=key):
        nbytes = groups.nbytes[group]
        beside = np.zeros(placed, bool)
        for number in groups.members[group]:
            beside |= (start[:placed] <= groups.end[number]) & (end[:placed] >= groups.start[number])
        at = _smallest_gap(low[:placed][beside], high[:placed][beside], nbytes, alignment)
        for number in groups.members[group]:
            start[placed], end[placed] = groups.start[number], groups.end[number]
            low[placed], high[placed] = at, at + nbytes
            placed += 1
        top = max(top, at + nbytes)
        if top >= most:
            return int(most)
    return top


def _smallest_gap(low: np.ndarray, high: np.ndarray, nbytes: int, alignment: int) -> int:
    """The offset of the smallest gap that holds `nbytes`, the lowest of equal ones; else the top of the heap."""
    if not len(low):
        return 0
    order = np.argsort(low)
    free = np.concatenate([[0], np.maximum.accumulate(-(-high[order] // alignment) * alignment)])
    gaps = low[order] - free[:-1]
    fitting = np.flatnonzero(gaps >= nbytes)
    return int(free[fitting[np.argmin(gaps[fitting])]] if len(fitting) else free[-1])
