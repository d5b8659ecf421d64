"""What each device holds of a value: pieces of sources, each summed over some devices.

A source is a value that no collective made. On every device, a value is a row of segments of sources in row-major
order, and each segment has owners: how often each device's elements are in its sum (see `owners`). Sums, gathers,
scatters and exchanges between devices become operations on these rows. An operation returns None where its result is no
such row.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from memplan.hardware.machine import Groups
from memplan.verify.owners import OWN, Owners

ZERO = -1  # the source of padding
_CHUNKS = 1 << 12  # in a transposed value

Step = Literal["terms", "sent", "summed", "gathered"]


class Operation(NamedTuple):
    """What makes a source."""

    opcode: str
    shape: str
    attributes: str
    called: tuple[int, ...]  # numbers of computations
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # of each: its shape and the numbers of its leaves


class Segment(NamedTuple):
    """Elements of a source, summed over devices."""

    source: int
    start: int
    length: int
    owners: int
    rounded: bool = False  # sent in fewer bits


class Wire(NamedTuple):
    """How far a sum has come that is sent in fewer bits."""

    dtype: str  # of the value
    step: Step
    groups: Groups = ()  # in which it is summed


@dataclass(frozen=True)
class Spread:
    """A value on all devices."""

    rows: tuple[int, ...]  # of each device: the number of its row of segments
    wire: Wire | None = None


@dataclass
class Spreads:
    """Numbered values: sources by what makes them, others by their rows."""

    partitions: int
    keys: list[object] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # elements
    arguments: list[int] = field(default_factory=list)  # a bit for each argument that the value depends on
    _arguments: int = 0
    _numbers: dict[object, int] = field(default_factory=dict)
    _rows: list[tuple[Segment, ...]] = field(default_factory=list)
    _row_numbers: dict[tuple[Segment, ...], int] = field(default_factory=dict)
    _totals: dict[tuple[tuple[int, ...], int], int | None] = field(default_factory=dict)
    _gathers: dict[tuple[tuple[int, ...], int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._owners = Owners(self.partitions)

    def number(self, key: object, size: int, arguments: int) -> int:
        """The number of a value that is made so."""
        if key not in self._numbers:
            self._numbers[key] = len(self.keys)
            self.keys.append(key)
            self.sizes.append(size)
            self.arguments.append(arguments)
        return self._numbers[key]

    def argument(self, key: object, size: int) -> int:
        """The number of an argument of a computation."""
        if key not in self._numbers:
            self._arguments += 1
        return self.number(key, size, 1 << self._arguments)

    def spread(self, value: int) -> Spread:
        key = self.keys[value]
        if isinstance(key, Spread):
            return key
        return Spread((self._row([Segment(value, 0, self.sizes[value], OWN)]),) * self.partitions)

    def value(self, spread: Spread) -> int:
        """The number of a value that is spread so; a source itself if each device has its own."""
        source = self.whole(spread)
        rows = set(spread.rows)
        if source is not None and all(
            self._rows[row][0].owners == OWN and not self._rows[row][0].rounded for row in rows
        ):
            return source
        sources = {segment.source for row in rows for segment in self._rows[row]} - {ZERO}
        arguments = functools.reduce(lambda all_, source: all_ | self.arguments[source], sources, 0)
        return self.number(spread, sum(segment.length for segment in self.rows(spread)[0]), arguments)

    def exact(self, value: int) -> int:
        """The value as if it had not been rounded on the way."""
        key = self.keys[value]
        if not isinstance(key, Spread) or key.wire is not None:
            return value
        if not any(one.rounded for row in set(key.rows) for one in self._rows[row]):
            return value
        return self.value(self._each(key, lambda row: [one._replace(rounded=False) for one in row]))

    def is_source(self, value: int) -> bool:
        return not isinstance(self.keys[value], Spread)

    def rows(self, spread: Spread) -> list[tuple[Segment, ...]]:
        return [self._rows[row] for row in spread.rows]

    def whole(self, spread: Spread) -> int | None:
        """The one source of which each device has all elements, each summed over the same devices."""
        rows = [self._rows[row] for row in set(spread.rows)]
        sources = {row[0].source if len(row) == 1 else ZERO for row in rows}
        source = sources.pop()
        if sources or source == ZERO or spread.wire is not None:
            return None
        fits = all((row[0].start, row[0].length) == (0, self.sizes[source]) for row in rows)
        return source if fits else None

    def with_source(self, spread: Spread, source: int) -> Spread:
        """Another source of as many elements in place of the one of a whole value."""
        return self._each(spread, lambda row: [row[0]._replace(source=source)])

    # on each device by itself

    def zeros(self, length: int) -> Spread:
        return Spread((self._row([Segment(ZERO, 0, length, 0)] if length else []),) * self.partitions)

    def joined(self, spreads: Sequence[Spread]) -> Spread | None:
        """One behind the other."""
        wires = {spread.wire for spread in spreads}
        if len(wires) != 1:
            return None
        known: dict[tuple[int, ...], int] = {}
        columns = list(zip(*(spread.rows for spread in spreads), strict=True))
        for column in set(columns):
            known[column] = self._row(itertools.chain(*(self._rows[row] for row in column)))
        return Spread(tuple(known[column] for column in columns), wires.pop())

    def pieces(self, spread: Spread, starts: Sequence[int], length: int) -> Spread:
        """So many elements, on each device from its own start on."""
        known: dict[tuple[int, int], int] = {}
        wanted = list(zip(spread.rows, starts, strict=True))
        for row, start in set(wanted):
            known[row, start] = self._row(_cut(self._rows[row], start, start + length))
        return Spread(tuple(known[one] for one in wanted), spread.wire)

    def piece(self, spread: Spread, start: int, length: int) -> Spread:
        return self.pieces(spread, (start,) * self.partitions, length)

    def added(self, spreads: Sequence[Spread]) -> Spread | None:
        """The sums of several values of one device."""
        wires = [spread.wire for spread in spreads]
        wire = wires[0]
        if wire is not None:
            given = {(one.dtype, one.groups) for one in wires if one is not None}
            steps = {one.step for one in wires if one is not None}
            if None in wires or given != {("f32", wire.groups)} or not steps <= {"sent", "summed"}:
                return None
            wire = wire._replace(step="summed")
        elif any(one is not None for one in wires):
            return None
        columns = zip(*(each.rows for each in spreads), strict=True)
        return self._with_rows([self._total(column, None) for column in columns], wire)

    # between devices

    def summed(self, spread: Spread, groups: Groups) -> Spread | None:
        """Each group's sum on all of its devices."""
        if spread.wire is not None:
            return None
        rows: list[int | None] = [None] * self.partitions
        for group in groups:
            total = self._total(tuple(spread.rows[member] for member in group), groups)
            for member in group:
                rows[member] = total
        return self._with_rows(rows)

    def gathered(self, spread: Spread, groups: Groups) -> Spread | None:
        """The values of a group's devices, one behind the other."""
        wire = spread.wire
        if wire is not None:
            if (wire.step, wire.groups) != ("summed", groups) or wire.dtype == "f32":
                return None
            wire = wire._replace(step="gathered")
        rows = [0] * self.partitions
        for group in groups:
            row = self._gathered(tuple(spread.rows[member] for member in group), groups)
            for member in group:
                rows[member] = row
        return Spread(tuple(rows), wire)

    def exchanged(self, parts: Sequence[Spread], groups: Groups) -> list[Spread] | None:
        """From each member of the group, in their order, the part that has the device's place."""
        wire = parts[0].wire
        if any(part.wire != wire for part in parts) or any(len(group) != len(parts) for group in groups):
            return None
        if wire is not None:
            if wire.step != "terms" or wire.dtype == "f32":
                return None
            wire = Wire(wire.dtype, "sent", groups)
        rows = [[0] * self.partitions for _ in parts]
        for group in groups:
            for sender, member in enumerate(group):
                for place, receiver in enumerate(group):
                    rows[sender][receiver] = self._gathered((parts[place].rows[member],), groups, sender)
        return [Spread(tuple(row), wire) for row in rows]

    # in fewer bits

    def narrowed(self, spread: Spread, dtype: str) -> Spread | None:
        """Float32 in fewer bits: sums over several devices that go to other devices, or what those have summed."""
        if spread.wire is None:
            rows = [self._rows[row] for row in set(spread.rows)]
            fits = all(one.source == ZERO or self._may_round(one) for row in rows for one in row)
            return replace(spread, wire=Wire(dtype, "terms")) if fits else None
        if (spread.wire.dtype, spread.wire.step) != ("f32", "summed"):
            return None
        return replace(spread, wire=spread.wire._replace(dtype=dtype))

    def widened(self, spread: Spread) -> Spread | None:
        """Back to float32: what came from other devices."""
        wire = spread.wire
        if wire is None or wire.step not in ("sent", "gathered"):
            return None
        if wire.step == "sent":
            return replace(spread, wire=wire._replace(dtype="f32"))
        return self._each(replace(spread, wire=None), lambda row: [one._replace(rounded=True) for one in row])

    def relabelled(self, spread: Spread, dtype: str) -> Spread | None:
        """The same bits on the way as another type."""
        return None if spread.wire is None else replace(spread, wire=spread.wire._replace(dtype=dtype))

    def _may_round(self, segment: Segment) -> bool:
        return not segment.rounded and self._owners.everywhere_several(segment.owners)

    # with dimensions in another order

    def transposed(self, spread: Spread, dims: Sequence[int], order: Sequence[int]) -> int | None:
        """The value, read as an array of these dimensions, with its dimensions in another order."""
        sizes, turn = _canonical(dims, order)
        if turn == tuple(range(len(turn))):
            return self.value(spread)
        if spread.wire is not None:
            return None
        sizes, turn, outer = _split_at(sizes, turn, self._common_chunk(spread))
        lead, tail = [one for one in turn if one < outer], [one for one in turn if one >= outer]
        if math.prod(sizes[:outer]) > _CHUNKS:
            return None
        inner = [one - outer for one in tail]
        rows: dict[int, int] = {}
        for row in set(spread.rows):
            chunks = self._chunks(self._rows[row], sizes, outer, inner)
            if chunks is None:
                return None
            rows[row] = self._row(itertools.chain(*(chunks[place] for place in _places(sizes[:outer], lead))))
        moved = Spread(tuple(rows[row] for row in spread.rows))
        now = [*lead, *tail]
        rest = _canonical([sizes[one] for one in now], [now.index(one) for one in turn])
        if rest[1] == tuple(range(len(rest[1]))):
            return self.value(moved)
        flat = self.exact(self.value(moved))
        return self.number(("permuted", flat, *rest), self.sizes[flat], self.arguments[flat])

    def piece_along(
        self, spread: Spread, dims: Sequence[int], dim: int, places: Sequence[int], count: int
    ) -> int | None:
        """Of so many equal pieces along a dimension, on each device the one in its place."""
        before, after = math.prod(dims[:dim]), math.prod(dims[dim:]) // count
        turned = self.transposed(spread, (before, count, after), (1, 0, 2))
        if turned is None or self._is_mixed(turned):
            return None
        length = before * after
        return self.value(self.pieces(self.spread(turned), [place * length for place in places], length))

    def _is_mixed(self, value: int) -> bool:
        """Its rows are known in another order of dimensions alone."""
        key = self.keys[value]
        return isinstance(key, tuple) and key[0] == "permuted"

    def _common_chunk(self, spread: Spread) -> int:
        """The largest size of which every segment of every device is a multiple."""
        return math.gcd(*(one.length for row in set(spread.rows) for one in self._rows[row]))

    def _chunks(
        self, row: Sequence[Segment], sizes: Sequence[int], outer: int, inner: Sequence[int]
    ) -> list[list[Segment]] | None:
        """The parts of a row for each place along the outer dimensions, the inner ones in another order."""
        length = math.prod(sizes[outer:])
        found: list[list[Segment]] = []
        for one in row:
            for start in range(0, one.length, length):
                found.append([_part(one, start, start + length)])
        if list(inner) == sorted(inner):
            return found
        if any(one.source != ZERO and (one.start, length) != (0, self.sizes[one.source]) for (one,) in found):
            return None
        return [self._turned(one, sizes[outer:], inner) for (one,) in found]

    def _turned(self, whole: Segment, sizes: Sequence[int], order: Sequence[int]) -> list[Segment]:
        """A whole source with dimensions in another order.

        Leading dimensions that lie side by side in the source and are no more than devices stay in its order, and the
        segments change places: a scatter in phases and one at once have pieces of the same source so.
        """
        if whole.source == ZERO:
            return [whole]
        count = _movable(sizes, order, self.partitions)
        kept = (*sorted(order[:count]), *order[count:])
        said = _canonical(sizes, kept)
        source = whole.source
        if said[1] != tuple(range(len(said[1]))):
            source = self.number(("transposed", source, *said), self.sizes[source], self.arguments[source])
        length = math.prod(sizes[one] for one in order[count:])
        first = sorted(order[:count])
        places = _places([sizes[one] for one in first], [first.index(one) for one in order[:count]])
        return [whole._replace(source=source, start=place * length, length=length) for place in places]

    # rows

    def _with_rows(self, rows: Sequence[int | None], wire: Wire | None = None) -> Spread | None:
        known = [row for row in rows if row is not None]
        return Spread(tuple(known), wire) if len(known) == len(rows) else None

    def _row(self, segments: Iterable[Segment]) -> int:
        """The number of a row; neighbours that belong together are one segment."""
        merged: list[Segment] = []
        for one in segments:
            if merged and _is_next(merged[-1], one):
                merged[-1] = merged[-1]._replace(length=merged[-1].length + one.length)
            else:
                merged.append(one)
        row = tuple(merged)
        if row not in self._row_numbers:
            self._row_numbers[row] = len(self._rows)
            self._rows.append(row)
        return self._row_numbers[row]

    def _each(self, spread: Spread, change: Callable[[Sequence[Segment]], Sequence[Segment]]) -> Spread:
        """Changed row by row."""
        rows = {row: self._row(change(self._rows[row])) for row in set(spread.rows)}
        return Spread(tuple(rows[row] for row in spread.rows), spread.wire)

    def _gathered(self, rows: tuple[int, ...], groups: Groups, first: int = 0) -> int:
        """The rows of a group's members from this place on, as each member sees them."""
        key = rows, self._owners.groups(groups) * self.partitions + first
        if key not in self._gathers:
            self._gathers[key] = self._row(
                one if one.source == ZERO else one._replace(owners=self._owners.fetched(one.owners, groups, place))
                for place, row in enumerate(rows, first)
                for one in self._rows[row]
            )
        return self._gathers[key]

    def _total(self, rows: tuple[int, ...], groups: Groups | None) -> int | None:
        """The sum of rows, element by element, of one device or of a group's members."""
        key = rows, -1 if groups is None else self._owners.groups(groups)
        if key not in self._totals:
            self._totals[key] = self._sum_of_rows(rows, groups)
        return self._totals[key]

    def _sum_of_rows(self, rows: tuple[int, ...], groups: Groups | None) -> int | None:
        if groups is not None and len(set(rows)) == 1:
            row = self._rows[rows[0]]
            if any(one.rounded for one in row):
                return None
            return self._row(
                one if one.source == ZERO else one._replace(owners=self._owners.over(one.owners, groups)) for one in row
            )
        if groups is not None:
            rows = tuple(self._gathered((row,), groups, place) for place, row in enumerate(rows))
        found: list[Segment] = []
        known = [self._rows[row] for row in rows]
        ends = sorted({end for row in known for end in itertools.accumulate(one.length for one in row)})
        for column in zip(*(_cut_at(row, ends) for row in known), strict=True):
            total = self._sum_of_segments(column)
            if total is None:
                return None
            found.append(total)
        return self._row(found)

    def _sum_of_segments(self, column: Sequence[Segment]) -> Segment | None:
        terms = [one for one in column if one.source != ZERO]
        if not terms:
            return column[0]
        first = terms[0]
        if any(one.rounded or (one.source, one.start) != (first.source, first.start) for one in terms):
            return None
        return first._replace(owners=self._owners.added(tuple(one.owners for one in terms)))


def _is_next(one: Segment, other: Segment) -> bool:
    if (one.source, one.owners, one.rounded) != (other.source, other.owners, other.rounded):
        return False
    return one.source == ZERO or one.start + one.length == other.start


def _cut(row: Sequence[Segment], start: int, end: int) -> list[Segment]:
    """The segments of a range of elements."""
    found: list[Segment] = []
    at = 0
    for one in row:
        if at >= end:
            break
        if at + one.length > start:
            first, last = max(start - at, 0), min(end - at, one.length)
            whole = last - first == one.length
            found.append(one if whole else _part(one, first, last))
        at += one.length
    return found


def _part(one: Segment, first: int, last: int) -> Segment:
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
            found.append(_part(one, first, last))
            first = last
        at += one.length
    return found


def _places(sizes: Sequence[int], order: Sequence[int]) -> Iterator[int]:
    """For each place of an array with its dimensions in another order: the place it had."""
    strides = [math.prod(sizes[one + 1 :]) for one in range(len(sizes))]
    for place in itertools.product(*(range(sizes[one]) for one in order)):
        yield sum(at * strides[one] for at, one in zip(place, order, strict=True))


def _canonical(dims: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions and their new order, without those of one element; those that stay side by side are one."""
    runs: list[list[int]] = []
    kept = [one for one in range(len(dims)) if dims[one] != 1]
    rank = {one: number for number, one in enumerate(kept)}
    for one in (rank[one] for one in order if one in rank):
        if runs and runs[-1][-1] + 1 == one:
            runs[-1].append(one)
        else:
            runs.append([one])
    inputs = sorted(runs)
    sizes = tuple(math.prod(dims[kept[one]] for one in run) for run in inputs)
    return sizes, tuple(inputs.index(run) for run in runs)


def _split_at(sizes: Sequence[int], order: Sequence[int], chunk: int) -> tuple[list[int], list[int], int]:
    """The dimensions such that the last ones have at most so many elements, a divisor of them; where those begin."""
    left, found = chunk, list(sizes)
    for dim in reversed(range(len(sizes))):
        shared = math.gcd(found[dim], left)
        if shared == found[dim]:
            left //= shared
            continue
        if shared == 1:
            return found, list(order), dim + 1
        found[dim : dim + 1] = [found[dim] // shared, shared]
        turn = [place for one in order for place in ((one, one + 1) if one == dim else (one + (one > dim),))]
        return found, turn, dim + 1
    return found, list(order), 0


def _movable(sizes: Sequence[int], order: Sequence[int], most: int) -> int:
    """How many leading dimensions lie side by side in the source and have no more elements than this."""
    found = 0
    for count in range(1, len(order) + 1):
        first = order[:count]
        if max(first) - min(first) + 1 == count and math.prod(sizes[one] for one in first) <= most:
            found = count
    return found
