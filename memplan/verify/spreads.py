"""What each device holds of a value: pieces of sources, each summed over some devices.

A source is a value that no collective made. On every device, a value is a row of segments of sources in row-major
order, and each segment has owners: how often each device's elements are in its sum (see `owners`). Sums, gathers,
scatters and exchanges between devices become operations on these rows. An operation returns None where its result is no
such row.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from memplan.hardware.machine import Groups
from memplan.verify.dimensions import canonical, movable, places, split_at
from memplan.verify.owners import OWN
from memplan.verify.rows import ZERO, Rows, Segment, cut, part

_CHUNKS = 1 << 12  # in a transposed value

Step = Literal["terms", "sent", "summed", "gathered"]


class Operation(NamedTuple):
    """What makes a source."""

    opcode: str
    shape: str
    attributes: str
    called: tuple[int, ...]  # numbers of computations
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # of each: its shape and the numbers of its leaves


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

    def __post_init__(self) -> None:
        self._rows = Rows(self.partitions)

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
        return Spread((self._rows.number([Segment(value, 0, self.sizes[value], OWN)]),) * self.partitions)

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
        return Spread((self._rows.number([Segment(ZERO, 0, length, 0)] if length else []),) * self.partitions)

    def joined(self, spreads: Sequence[Spread]) -> Spread | None:
        """One behind the other."""
        wires = {spread.wire for spread in spreads}
        if len(wires) != 1:
            return None
        known: dict[tuple[int, ...], int] = {}
        columns = list(zip(*(spread.rows for spread in spreads), strict=True))
        for column in set(columns):
            known[column] = self._rows.number(itertools.chain(*(self._rows[row] for row in column)))
        return Spread(tuple(known[column] for column in columns), wires.pop())

    def pieces(self, spread: Spread, starts: Sequence[int], length: int) -> Spread:
        """So many elements, on each device from its own start on."""
        known: dict[tuple[int, int], int] = {}
        wanted = list(zip(spread.rows, starts, strict=True))
        for row, start in set(wanted):
            known[row, start] = self._rows.number(cut(self._rows[row], start, start + length))
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
        return self._with_rows([self._rows.total(column, None) for column in columns], wire)

    # between devices

    def summed(self, spread: Spread, groups: Groups) -> Spread | None:
        """Each group's sum on all of its devices."""
        if spread.wire is not None:
            return None
        rows: list[int | None] = [None] * self.partitions
        for group in groups:
            total = self._rows.total(tuple(spread.rows[member] for member in group), groups)
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
            row = self._rows.gathered(tuple(spread.rows[member] for member in group), groups)
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
                    rows[sender][receiver] = self._rows.gathered((parts[place].rows[member],), groups, sender)
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
        return not segment.rounded and self._rows.owners.everywhere_several(segment.owners)

    # with dimensions in another order

    def transposed(self, spread: Spread, dims: Sequence[int], order: Sequence[int]) -> int | None:
        """The value, read as an array of these dimensions, with its dimensions in another order."""
        sizes, turn = canonical(dims, order)
        if turn == tuple(range(len(turn))):
            return self.value(spread)
        if spread.wire is not None:
            return None
        sizes, turn, outer = split_at(sizes, turn, self._common_chunk(spread))
        lead, tail = [one for one in turn if one < outer], [one for one in turn if one >= outer]
        if math.prod(sizes[:outer]) > _CHUNKS:
            return None
        inner = [one - outer for one in tail]
        rows: dict[int, int] = {}
        for row in set(spread.rows):
            chunks = self._chunks(self._rows[row], sizes, outer, inner)
            if chunks is None:
                return None
            rows[row] = self._rows.number(itertools.chain(*(chunks[place] for place in places(sizes[:outer], lead))))
        moved = Spread(tuple(rows[row] for row in spread.rows))
        now = [*lead, *tail]
        rest = canonical([sizes[one] for one in now], [now.index(one) for one in turn])
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
                found.append([part(one, start, start + length)])
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
        count = movable(sizes, order, self.partitions)
        kept = (*sorted(order[:count]), *order[count:])
        said = canonical(sizes, kept)
        source = whole.source
        if said[1] != tuple(range(len(said[1]))):
            source = self.number(("transposed", source, *said), self.sizes[source], self.arguments[source])
        length = math.prod(sizes[one] for one in order[count:])
        first = sorted(order[:count])
        turned = places([sizes[one] for one in first], [first.index(one) for one in order[:count]])
        return [whole._replace(source=source, start=place * length, length=length) for place in turned]

    # rows

    def _with_rows(self, rows: Sequence[int | None], wire: Wire | None = None) -> Spread | None:
        known = [row for row in rows if row is not None]
        return Spread(tuple(known), wire) if len(known) == len(rows) else None

    def _each(self, spread: Spread, change: Callable[[Sequence[Segment]], Sequence[Segment]]) -> Spread:
        """Changed row by row."""
        rows = {row: self._rows.number(change(self._rows[row])) for row in set(spread.rows)}
        return Spread(tuple(rows[row] for row in spread.rows), spread.wire)
