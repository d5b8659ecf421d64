"""Rows of segments: the elements that one device has of a value, in order."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memplan.hardware.machine import Groups
from memplan.verify.owners import Owners

ZERO = -1  # the source of padding


class Segment(NamedTuple):
    """Elements of a source, summed over devices."""

    source: int
    start: int
    length: int
    owners: int
    rounded: bool = False  # sent in fewer bits


class Rows:
    """Numbered: equal numbers for equal rows."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self.owners = Owners(partitions)
        self._rows: list[tuple[Segment, ...]] = []
        self._numbers: dict[tuple[Segment, ...], int] = {}
        self._totals: dict[tuple[tuple[int, ...], int], int | None] = {}
        self._gathers: dict[tuple[tuple[int, ...], int], int] = {}

    def __getitem__(self, row: int) -> tuple[Segment, ...]:
        return self._rows[row]

    def number(self, segments: Iterable[Segment]) -> int:
        """The number of a row; neighbours that belong together are one segment."""
        merged: list[Segment] = []
        for one in segments:
            if merged and _is_next(merged[-1], one):
                merged[-1] = merged[-1]._replace(length=merged[-1].length + one.length)
            else:
                merged.append(one)
        row = tuple(merged)
        if row not in self._numbers:
            self._numbers[row] = len(self._rows)
            self._rows.append(row)
        return self._numbers[row]

    def gathered(self, rows: tuple[int, ...], groups: Groups, first: int = 0) -> int:
        """The rows of a group's members from this place on, as each member sees them."""
        key = rows, self.owners.groups(groups) * self._partitions + first
        if key not in self._gathers:
            self._gathers[key] = self.number(
                one if one.source == ZERO else one._replace(owners=self.owners.fetched(one.owners, groups, place))
                for place, row in enumerate(rows, first)
                for one in self[row]
            )
        return self._gathers[key]

    def total(self, rows: tuple[int, ...], groups: Groups | None) -> int | None:
        """The sum of rows, element by element, of one device or of a group's members."""
        key = rows, -1 if groups is None else self.owners.groups(groups)
        if key not in self._totals:
            self._totals[key] = self._sum_of_rows(rows, groups)
        return self._totals[key]

    def _sum_of_rows(self, rows: tuple[int, ...], groups: Groups | None) -> int | None:
        if groups is not None and len(set(rows)) == 1:
            row = self[rows[0]]
            if any(one.rounded for one in row):
                return None
            return self.number(
                one if one.source == ZERO else one._replace(owners=self.owners.over(one.owners, groups)) for one in row
            )
        if groups is not None:
            rows = tuple(self.gathered((row,), groups, place) for place, row in enumerate(rows))
        found: list[Segment] = []
        known = [self[row] for row in rows]
        ends = sorted({end for row in known for end in itertools.accumulate(one.length for one in row)})
        for column in zip(*(_cut_at(row, ends) for row in known), strict=True):
            total = self._sum_of_segments(column)
            if total is None:
                return None
            found.append(total)
        return self.number(found)

    def _sum_of_segments(self, column: Sequence[Segment]) -> Segment | None:
        terms = [one for one in column if one.source != ZERO]
        if not terms:
            return column[0]
        first = terms[0]
        if any(one.rounded or (one.source, one.start) != (first.source, first.start) for one in terms):
            return None
        return first._replace(owners=self.owners.added(tuple(one.owners for one in terms)))


def _is_next(one: Segment, other: Segment) -> bool:
    if (one.source, one.owners, one.rounded) != (other.source, other.owners, other.rounded):
        return False
    return one.source == ZERO or one.start + one.length == other.start


def cut(row: Sequence[Segment], start: int, end: int) -> list[Segment]:
    """The segments of a range of elements."""
    found: list[Segment] = []
    at = 0
    for one in row:
        if at >= end:
            break
        if at + one.length > start:
            first, last = max(start - at, 0), min(end - at, one.length)
            whole = last - first == one.length
            found.append(one if whole else part(one, first, last))
        at += one.length
    return found


def part(one: Segment, first: int, last: int) -> Segment:
    start = 0 if one.source == ZERO else one.start + first
    return Segment(one.source, start, last - first, one.owners, one.rounded)


def _cut_at(row: Sequence[Segment], ends: Sequence[int]) -> list[Segment]:
    """The segments, cut at these ends, which are those of the segments and more."""
    found: list[Segment] = []
    at, cuts = 0, iter(ends)
    for one in row:
        first = 0
        while first < one.length:
            last = next(cuts) - at
            found.append(part(one, first, last))
            first = last
        at += one.length
    return found
