"""Spread arrays: the elements of each source that a device holds, and over whom they are summed."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memplan.hardware.machine import Groups
from memplan.verify.pieces import (
    ZERO,
    Digit,
    Piece,
    Row,
    cut,
    cut_at,
    ends,
    joined,
    narrowed,
    normal,
    size_of,
    stacked,
    turned,
    zeros,
)

Sizes = tuple[int, int, int]  # elements outside of a dimension, in it, and inside of it
Combine = Callable[[Sequence[Row]], Row | None]


@dataclass(frozen=True)
class Spread:
    """An array on all devices.

    Attributes:
      rows: the different rows that devices hold, each once.
      kinds: for every device, which of the rows it holds.
    """

    rows: tuple[Row, ...]
    kinds: tuple[int, ...]

    def on(self, device: int) -> Row:
        return self.rows[self.kinds[device]]


@dataclass(frozen=True, eq=False)
class Teams:
    """The groups of a collective: every device is in one, and all have the same size."""

    groups: Groups

    @cached_property
    def rank(self) -> Mapping[int, int]:
        """For every device, its position in its group."""
        return {member: rank for group in self.groups for rank, member in enumerate(group)}

    @cached_property
    def group(self) -> Mapping[int, tuple[int, ...]]:
        return {member: group for group in self.groups for member in group}

    @property
    def size(self) -> int:
        return len(self.groups[0])


class Owners:
    """Numbered maps from a device to the devices over which an element is summed there.

    A device that is added twice is counted twice.
    """

    def __init__(self, devices: int) -> None:
        self._sets: dict[tuple[int, ...], int] = {}
        self._members: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._maps: list[tuple[int, ...]] = []
        self._results: dict[Hashable, int] = {}
        # Each device has its own element alone.
        self.own = self.number([self._set((device,)) for device in range(devices)])

    def number(self, sets: Iterable[int]) -> int:
        """The number of the map that has these sets, device by device."""
        key = tuple(sets)
        if key not in self._numbers:
            self._numbers[key] = len(self._maps)
            self._maps.append(key)
        return self._numbers[key]

    def _set(self, devices: Iterable[int]) -> int:
        key = tuple(sorted(devices))
        if key not in self._sets:
            self._sets[key] = len(self._members)
            self._members.append(key)
        return self._sets[key]

    def at(self, number: int, device: int) -> int:
        """The number of the set of a device."""
        return self._maps[number][device]

    def members(self, number: int, device: int) -> tuple[int, ...]:
        """The devices over which an element is summed there."""
        return self._members[self.at(number, device)]

    def plus(self, numbers: tuple[int, ...]) -> int:
        """Several elements of each device added."""
        if (key := ("plus", numbers)) not in self._results:
            maps = [self._maps[number] for number in numbers]
            unions = [self._union(sets) for sets in zip(*maps, strict=True)]
            self._results[key] = self.number(unions)
        return self._results[key]

    def summed(self, numbers: tuple[int, ...], teams: Teams) -> int:
        """The elements of all devices of a group added.

        The element of the device at a position of the group has the map at that position.
        """
        if (key := ("summed", numbers, teams)) not in self._results:
            sets = list(self._maps[0])
            for group in teams.groups:
                pairs = zip(numbers, group, strict=True)
                union = self._union(self.at(number, member) for number, member in pairs)
                for member in group:
                    sets[member] = union
            self._results[key] = self.number(sets)
        return self._results[key]

    def moved(self, number: int, teams: Teams, rank: int) -> int:
        """The element of the device at this position of the group, on all devices of the group."""
        if (key := ("moved", number, teams, rank)) not in self._results:
            sets = list(self._maps[0])
            for group in teams.groups:
                for member in group:
                    sets[member] = self.at(number, group[rank])
            self._results[key] = self.number(sets)
        return self._results[key]

    def _union(self, sets: Iterable[int]) -> int:
        key = ("union", tuple(sets))
        if key not in self._results:
            members = itertools.chain.from_iterable(self._members[number] for number in key[1])
            self._results[key] = self._set(members)
        return self._results[key]


@dataclass
class Spreads:
    """Spread arrays as results of collectives and of instructions that move elements.

    A result is None where digits cannot count its elements out; the instruction is then an
    expression of its own.
    """

    devices: int
    owners: Owners = field(init=False)
    # (source, size) -> pieces joined with other arrays so far
    _views: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owners = Owners(self.devices)

    def replicated(self, row: Row) -> Spread:
        """The same row on all devices."""
        return Spread((row,), (0,) * self.devices)

    def whole(self, source: int, size: int, owners: int) -> Spread:
        return self.replicated((normal(Piece(source, 0, (Digit(size, 1, 0),), (owners,))),))

    def zeros(self, size: int) -> Spread:
        return self.replicated((zeros(size),))

    def is_zero(self, spread: Spread) -> bool:
        return all(piece.source == ZERO for row in spread.rows for piece in row)

    def is_own(self, spread: Spread) -> bool:
        """Does every device hold its own elements alone?"""
        own = ((self.owners.own,), ())
        return all(piece.owners in own for row in spread.rows for piece in row)

    def sum_of(self, spread: Spread) -> int | None:
        """The map of all its elements' owners; None where they differ."""
        owners = {piece.owners for row in spread.rows for piece in row}
        if len(spread.rows) != 1 or len(owners) != 1:
            return None
        (numbers,) = owners
        return numbers[0] if len(numbers) == 1 else None

    def before_sum(self, spread: Spread) -> Spread:
        """The same elements, of each device its own alone."""
        own = (self.owners.own,)
        return self.replicated(tuple(piece._replace(owners=own) for piece in spread.rows[0]))

    def narrowed(self, spread: Spread, sizes: Sizes, low: int, high: int) -> Spread | None:
        """A range of the middle one of three dimensions."""
        return self._each(spread, lambda row: self._refolded(narrowed(row, sizes, low, high)))

    def turned(self, spread: Spread, dims: Sequence[int], order: Sequence[int]) -> Spread | None:
        """A transposed array."""
        return self._each(spread, lambda row: turned(row, dims, order))

    def at_starts(
        self,
        spread: Spread,
        sizes: Sizes,
        starts: Sequence[int],
        size: int,
    ) -> Spread | None:
        """A dynamic slice of the middle one of three dimensions, with a start for every device."""
        keys = list(zip(spread.kinds, starts, strict=True))
        rows: dict[tuple[int, int], Row | None] = {}
        for kind, start in keys:
            if (kind, start) not in rows:
                row = narrowed(spread.rows[kind], sizes, start, start + size)
                rows[kind, start] = self._refolded(row)
        return _spread(rows[key] for key in keys)

    def joined(self, spreads: Sequence[Spread]) -> Spread | None:
        """Arrays one behind the other."""
        for spread in spreads:
            for row in spread.rows:
                if len(row) == 1 and len(row[0].digits) > 1:
                    views = self._views.setdefault((row[0].source, row[0].size), [])
                    if row[0] not in views:
                        views.append(row[0])
        return self._zipped(spreads, lambda rows: joined(itertools.chain.from_iterable(rows)))

    def added(self, spreads: Sequence[Spread]) -> Spread | None:
        """The same elements of the same sources, added on each device."""
        return self._zipped(spreads, lambda rows: _sum(rows, self.owners.plus))

    def summed(self, spread: Spread, teams: Teams) -> Spread | None:
        """The result of an adding all-reduce."""

        def add(rows: Sequence[Row]) -> Row | None:
            return _sum(rows, lambda maps: self.owners.summed(maps, teams))

        return self._in_groups(spread, teams, add)

    def gathered(self, spread: Spread, teams: Teams, outer: int) -> Spread | None:
        """The result of an all-gather along a dimension behind `outer` elements."""

        def gather(rows: Sequence[Row]) -> Row | None:
            return stacked([self._moved(row, teams, rank) for rank, row in enumerate(rows)], outer)

        return self._in_groups(spread, teams, gather)

    def exchanged(self, sent: Sequence[Spread], teams: Teams) -> list[Spread | None]:
        """The results of an all-to-all: a device gets from each member the piece for its rank."""
        received: list[Spread | None] = []
        for sender in range(len(sent)):
            moved = [[self._moved(row, teams, sender) for row in spread.rows] for spread in sent]
            rows: list[Row] = []
            for device in range(self.devices):
                rank = teams.rank[device]
                kind = sent[rank].kinds[teams.group[device][sender]]
                rows.append(moved[rank][kind])
            received.append(_spread(rows))
        return received

    def scattered(self, spread: Spread, teams: Teams, sizes: Sizes) -> Spread | None:
        """The result of an adding reduce-scatter along the middle one of three dimensions."""
        total = self.summed(spread, teams)
        if total is None or sizes[1] % teams.size:
            return None
        size = sizes[1] // teams.size
        starts = [size * teams.rank[device] for device in range(self.devices)]
        return self.at_starts(total, sizes, starts, size)

    def meaning(self, spread: Spread) -> Hashable:
        """Equal for equal arrays: the elements that each device holds, and their owners there."""
        if len(spread.rows) == 1:
            return spread.rows[0]
        numbers: dict[Hashable, int] = {}
        classes: list[int] = []  # of each row: of rows that differ in their owners alone
        for row in spread.rows:
            elements = tuple(map(_elements, row))
            classes.append(numbers.setdefault(elements, len(numbers)))
        if len(numbers) == 1:
            return self._overlaid(spread)
        owners: list[list[int]] = [[] for _ in numbers]
        for device, kind in enumerate(spread.kinds):
            for piece in spread.rows[kind]:
                owners[classes[kind]] += [self.owners.at(owner, device) for owner in piece.owners]
        elements_of = tuple(zip(numbers, map(tuple, owners), strict=True))
        return elements_of, tuple(classes[kind] for kind in spread.kinds)

    def _overlaid(self, spread: Spread) -> Row:
        """The one row of devices that differ in the numbers of their owners alone."""
        devices = range(self.devices)
        rows = [spread.on(device) for device in devices]
        pieces: list[Piece] = []
        for position, piece in enumerate(spread.rows[0]):
            maps = zip(*(row[position].owners for row in rows), strict=True)
            owners = [self.owners.number(map(self.owners.at, numbers, devices)) for numbers in maps]
            pieces.append(normal(piece._replace(owners=tuple(owners))))
        return joined(pieces)

    def _moved(self, row: Row, teams: Teams, rank: int) -> Row:
        """The row of the device at this position of the group."""

        def moved(piece: Piece) -> Piece:
            owners = tuple(self.owners.moved(owner, teams, rank) for owner in piece.owners)
            return piece._replace(owners=owners)

        return tuple(map(moved, row))

    def _each(self, spread: Spread, change: Callable[[Row], Row | None]) -> Spread | None:
        rows = [change(row) for row in spread.rows]
        if len(rows) == 1:
            return self._replicated(rows[0])
        return _spread(rows[kind] for kind in spread.kinds)

    def _replicated(self, row: Row | None) -> Spread | None:
        return None if row is None else self.replicated(row)

    def _zipped(self, spreads: Sequence[Spread], change: Combine) -> Spread | None:
        """A row of each array -> a row, on each device."""
        if all(len(spread.rows) == 1 for spread in spreads):
            return self._replicated(change([spread.rows[0] for spread in spreads]))
        patterns = list(zip(*(spread.kinds for spread in spreads), strict=True))
        rows: dict[tuple[int, ...], Row | None] = {}
        for pattern in set(patterns):
            pairs = zip(spreads, pattern, strict=True)
            rows[pattern] = change([spread.rows[kind] for spread, kind in pairs])
        return _spread(rows[pattern] for pattern in patterns)

    def _in_groups(self, spread: Spread, teams: Teams, change: Combine) -> Spread | None:
        """The rows of a group's members -> a row that all of them hold."""
        if len(spread.rows) == 1:
            return self._replicated(change(spread.rows * teams.size))
        results: dict[tuple[int, ...], Row | None] = {}
        rows: list[Row | None] = [None] * self.devices
        for group in teams.groups:
            pattern = tuple(spread.kinds[member] for member in group)
            if pattern not in results:
                results[pattern] = change([spread.rows[kind] for kind in pattern])
            for member in group:
                rows[member] = results[pattern]
        return _spread(rows)

    def _refolded(self, row: Row | None) -> Row | None:
        """Cuts of an array that was joined with others are that array again, once all are in."""
        if row is None or len(row) == 1:
            return row
        marks = ends(row)
        for view in self._views.get((row[0].source, size_of(row)), ()):
            array = view._replace(owners=row[0].owners)
            cuts = [cut(array, low, high) for low, high in itertools.pairwise(marks)]
            has_one_sum = len(view.owners) == len(array.owners) == 1
            if has_one_sum and cuts == [[piece] for piece in row]:
                return (array,)
        return row


def _spread(rows: Iterable[Row | None]) -> Spread | None:
    """A row for each device."""
    numbers: dict[Row, int] = {}
    kinds: list[int] = []
    for row in rows:
        if row is None:
            return None
        kinds.append(numbers.setdefault(row, len(numbers)))
    return Spread(tuple(numbers), tuple(kinds))


def _sum(rows: Sequence[Row], plus: Callable[[tuple[int, ...]], int]) -> Row | None:
    """The sum of rows that have the same elements of the same sources; None if they have not."""
    different = {id(row): row for row in rows}  # most members of a group hold the same row
    marks = sorted({mark for row in different.values() for mark in ends(row)})
    cuts: dict[int, Sequence[Piece]] = {}
    for key, row in different.items():
        cuts[key] = row if len(row) + 1 == len(marks) else cut_at(row, marks)
    if len({tuple(map(_elements, pieces)) for pieces in cuts.values()}) > 1:
        return None
    sums: list[Piece] = []
    for terms in zip(*(cuts[id(row)] for row in rows), strict=True):
        maps = zip(*(piece.owners for piece in terms), strict=True)
        owners = tuple(plus(numbers) for numbers in maps)
        sums.append(normal(terms[0]._replace(owners=owners)))
    return joined(sums)


def _elements(piece: Piece) -> Hashable:
    """The elements that a piece has, whatever their owners."""
    return piece.source, piece.start, piece.digits, len(piece.owners)
