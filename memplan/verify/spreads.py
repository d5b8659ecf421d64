"""Spread arrays: for every device, which elements of which sources it holds, and over which devices they are summed."""

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


@dataclass(frozen=True)
class Spread:
    """An array on all devices.

    Attributes:
      rows: what devices hold, each way once.
      kinds: for every device, which of the rows it holds.
    """

    rows: tuple[Row, ...]
    kinds: tuple[int, ...]

    def on(self, device: int) -> Row:
        return self.rows[self.kinds[device]]


@dataclass(frozen=True, eq=False)
class Teams:
    """The groups of a collective: every device is in one, and all have as many."""

    groups: Groups

    @cached_property
    def place(self) -> Mapping[int, int]:
        """For every device, its place in its group."""
        return {member: place for group in self.groups for place, member in enumerate(group)}

    @cached_property
    def group(self) -> Mapping[int, tuple[int, ...]]:
        return {member: group for group in self.groups for member in group}

    @property
    def size(self) -> int:
        return len(self.groups[0])


class Owners:
    """Numbered maps from a device to the devices over which an element is summed there, counted as often as added."""

    def __init__(self, devices: int) -> None:
        self._sets: dict[tuple[int, ...], int] = {}
        self._members: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._maps: list[tuple[int, ...]] = []
        self._known: dict[Hashable, int] = {}
        self.own = self.number([self._set((device,)) for device in range(devices)])  # each its own element alone

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
        if (key := ("plus", numbers)) not in self._known:
            maps = [self._maps[number] for number in numbers]
            self._known[key] = self.number([self._union(sets) for sets in zip(*maps, strict=True)])
        return self._known[key]

    def summed(self, numbers: tuple[int, ...], teams: Teams) -> int:
        """The elements of all devices of a group added; the one at a place of the group has the map of that place."""
        if (key := ("summed", numbers, teams)) not in self._known:
            found = list(self._maps[0])
            for group in teams.groups:
                union = self._union(self._maps[one][member] for one, member in zip(numbers, group, strict=True))
                for member in group:
                    found[member] = union
            self._known[key] = self.number(found)
        return self._known[key]

    def moved(self, number: int, teams: Teams, place: int) -> int:
        """The element of the device at this place of the group, on all devices of the group."""
        if (key := ("moved", number, teams, place)) not in self._known:
            found = list(self._maps[0])
            for group in teams.groups:
                for member in group:
                    found[member] = self._maps[number][group[place]]
            self._known[key] = self.number(found)
        return self._known[key]

    def _union(self, sets: Iterable[int]) -> int:
        key = ("union", tuple(sets))
        if key not in self._known:
            self._known[key] = self._set(one for number in key[1] for one in self._members[number])
        return self._known[key]


@dataclass
class Spreads:
    """What collectives, and instructions that move elements, make of spread arrays.

    A result is None where the elements do not follow from digits; the instruction is then an expression of its own.
    """

    devices: int
    owners: Owners = field(init=False)
    _views: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)  # (source, size) -> pieces joined so far

    def __post_init__(self) -> None:
        self.owners = Owners(self.devices)

    def alike(self, row: Row) -> Spread:
        """The same row on all devices."""
        return Spread((row,), (0,) * self.devices)

    def whole(self, source: int, size: int, owners: int) -> Spread:
        return self.alike((normal(Piece(source, 0, (Digit(size, 1, 0),), (owners,))),))

    def zeros(self, size: int) -> Spread:
        return self.alike((zeros(size),))

    def is_zero(self, spread: Spread) -> bool:
        return all(piece.source == ZERO for row in spread.rows for piece in row)

    def is_own(self, spread: Spread) -> bool:
        """Does every device hold its own elements alone?"""
        own = ((self.owners.own,), ())
        return all(piece.owners in own for row in spread.rows for piece in row)

    def sum_of(self, spread: Spread) -> int | None:
        """The map of all its elements' owners; None where they differ."""
        found = {piece.owners for row in spread.rows for piece in row}
        (owners,) = found if len(spread.rows) == len(found) == 1 else ((),)
        return owners[0] if len(owners) == 1 else None

    def before_sum(self, spread: Spread) -> Spread:
        """The same elements, of each device its own alone."""
        own = (self.owners.own,)
        return self.alike(tuple(piece._replace(owners=own) for piece in spread.rows[0]))

    def narrowed(self, spread: Spread, sizes: tuple[int, int, int], low: int, high: int) -> Spread | None:
        """A range of the middle one of three dimensions."""
        return self._each(spread, lambda row: self._refolded(narrowed(row, sizes, low, high)))

    def turned(self, spread: Spread, dims: Sequence[int], order: Sequence[int]) -> Spread | None:
        """A transposed array."""
        return self._each(spread, lambda row: turned(row, dims, order))

    def at_starts(self, spread: Spread, sizes: tuple[int, int, int], starts: Sequence[int], size: int) -> Spread | None:
        """A range of the middle one of three dimensions that starts elsewhere on every device."""
        known: dict[tuple[int, int], Row | None] = {}
        for key in zip(spread.kinds, starts, strict=True):
            if key not in known:
                kind, start = key
                known[key] = self._refolded(narrowed(spread.rows[kind], sizes, start, start + size))
        return _spread(known[key] for key in zip(spread.kinds, starts, strict=True))

    def joined(self, spreads: Sequence[Spread]) -> Spread | None:
        """Arrays one behind the other."""
        for spread in spreads:
            for row in spread.rows:
                if len(row) == 1 and len(row[0].digits) > 1:
                    views = self._views.setdefault((row[0].source, row[0].size), [])
                    if row[0] not in views:
                        views.append(row[0])
        return self._together(spreads, lambda rows: joined(piece for row in rows for piece in row))

    def added(self, spreads: Sequence[Spread]) -> Spread | None:
        """Elements of the same place of the same source, added on each device."""
        return self._together(spreads, lambda rows: _sum(rows, self.owners.plus))

    def summed(self, spread: Spread, teams: Teams) -> Spread | None:
        """What an adding all-reduce makes."""
        return self._in_groups(spread, teams, lambda rows: _sum(rows, lambda maps: self.owners.summed(maps, teams)))

    def gathered(self, spread: Spread, teams: Teams, outer: int) -> Spread | None:
        """What an all-gather along a dimension behind `outer` elements makes."""

        def gather(rows: Sequence[Row]) -> Row | None:
            return stacked([self._moved(row, teams, place) for place, row in enumerate(rows)], outer)

        return self._in_groups(spread, teams, gather)

    def exchanged(self, sent: Sequence[Spread], teams: Teams) -> list[Spread | None]:
        """What an all-to-all makes: from each member of a group the piece that it sends to one's own place."""
        found: list[Spread | None] = []
        for place in range(len(sent)):
            moved = [[self._moved(row, teams, place) for row in spread.rows] for spread in sent]
            rows: list[Row] = []
            for device in range(self.devices):
                to = teams.place[device]
                rows.append(moved[to][sent[to].kinds[teams.group[device][place]]])
            found.append(_spread(rows))
        return found

    def scattered(self, spread: Spread, teams: Teams, sizes: tuple[int, int, int]) -> Spread | None:
        """What an adding reduce-scatter along the middle one of three dimensions makes."""
        total = self.summed(spread, teams)
        if total is None or sizes[1] % teams.size:
            return None
        size = sizes[1] // teams.size
        return self.at_starts(total, sizes, [size * teams.place[device] for device in range(self.devices)], size)

    def meaning(self, spread: Spread) -> Hashable:
        """Equal for equal arrays: what each device holds, and the owners there."""
        if len(spread.rows) == 1:
            return spread.rows[0]
        kinds: dict[Hashable, int] = {}
        classes = [kinds.setdefault(tuple(map(_place, row)), len(kinds)) for row in spread.rows]
        held: list[list[int]] = [[] for _ in kinds]
        for device, kind in enumerate(spread.kinds):
            for piece in spread.rows[kind]:
                held[classes[kind]] += [self.owners.at(number, device) for number in piece.owners]
        if len(kinds) == 1:
            return self._overlaid(spread)
        return tuple(zip(kinds, map(tuple, held), strict=True)), tuple(classes[kind] for kind in spread.kinds)

    def _overlaid(self, spread: Spread) -> Row:
        """The one row of devices that differ in the numbers of their owners alone."""
        devices, found = range(self.devices), list[Piece]()
        for number, piece in enumerate(spread.rows[0]):
            owners = [
                self.owners.number(self.owners.at(spread.on(device)[number].owners[turn], device) for device in devices)
                for turn in range(len(piece.owners))
            ]
            found.append(normal(piece._replace(owners=tuple(owners))))
        return joined(found)

    def _moved(self, row: Row, teams: Teams, place: int) -> Row:
        """The row of the device at this place of the group."""
        return tuple(
            piece._replace(owners=tuple(self.owners.moved(one, teams, place) for one in piece.owners)) for piece in row
        )

    def _each(self, spread: Spread, change: Callable[[Row], Row | None]) -> Spread | None:
        rows = [change(row) for row in spread.rows]
        return _spread([rows[kind] for kind in spread.kinds]) if len(rows) > 1 else self._one(rows[0])

    def _one(self, row: Row | None) -> Spread | None:
        return None if row is None else self.alike(row)

    def _together(self, spreads: Sequence[Spread], change: Callable[[Sequence[Row]], Row | None]) -> Spread | None:
        """A row of each array -> a row, on each device."""
        if all(len(spread.rows) == 1 for spread in spreads):
            return self._one(change([spread.rows[0] for spread in spreads]))
        patterns = list(zip(*(spread.kinds for spread in spreads), strict=True))
        known = {
            pattern: change([spread.rows[kind] for spread, kind in zip(spreads, pattern, strict=True)])
            for pattern in set(patterns)
        }
        return _spread(known[pattern] for pattern in patterns)

    def _in_groups(self, spread: Spread, teams: Teams, change: Callable[[Sequence[Row]], Row | None]) -> Spread | None:
        """The rows of a group's members -> a row that all of them hold."""
        if len(spread.rows) == 1:
            return self._one(change(spread.rows * teams.size))
        known: dict[tuple[int, ...], Row | None] = {}
        found: list[Row | None] = [None] * self.devices
        for group in teams.groups:
            pattern = tuple(spread.kinds[member] for member in group)
            if pattern not in known:
                known[pattern] = change([spread.rows[kind] for kind in pattern])
            for member in group:
                found[member] = known[pattern]
        return _spread(found)

    def _refolded(self, row: Row | None) -> Row | None:
        """Cuts of an array that was joined with others are that array again once all are together."""
        if row is None or len(row) == 1:
            return row
        for view in self._views.get((row[0].source, size_of(row)), ()):
            known = view._replace(owners=row[0].owners)
            marks = ends(row)
            parts = [cut(known, low, high) for low, high in itertools.pairwise(marks)]
            if len(view.owners) == len(known.owners) == 1 and parts == [[piece] for piece in row]:
                return (known,)
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
    different = {id(row): row for row in rows}  # the members of a group mostly hold one
    marks = sorted({mark for row in different.values() for mark in ends(row)})
    cuts = {key: row if len(row) + 1 == len(marks) else cut_at(row, marks) for key, row in different.items()}
    if len({tuple(map(_place, row)) for row in cuts.values()}) > 1:
        return None
    parts = [cuts[id(row)] for row in rows]
    found: list[Piece] = []
    for pieces in zip(*parts, strict=True):
        owners = zip(*(piece.owners for piece in pieces), strict=True)
        found.append(normal(pieces[0]._replace(owners=tuple(plus(maps) for maps in owners))))
    return joined(found)


def _place(piece: Piece) -> Hashable:
    """Which elements it has, whatever their owners."""
    return piece.source, piece.start, piece.digits, len(piece.owners)
