"""A program in slabs: which of its ops run slab by slab in loops, and the values that loops read, write and sum.

A loop computes ops over slabs of one axis: trip `t` makes rows `t * rows` to `(t + 1) * rows` of every array on it. A
sum along the axis is known only after the loop: this is a wall, after which another loop begins. So ops have levels,
and there is one loop per level. A value of an earlier level is read from the array that its loop wrote (`stored`), or
recomputed.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from memplan.planning.graph import Graph, Rows, Span


@dataclass(frozen=True)
class AlongOp:
    """An op that may run in slabs."""

    # (value, rows of it that the op's rows read), for each input that is read by slabs
    reads: tuple[tuple[int, Rows], ...]
    base: int  # the value that counts the op's rows: a result, or an input if the op sums along the axis
    reduces: bool  # its results are sums (or extremes) over all slabs
    # a row of its results needs the row before it, from the previous trip if necessary
    carries: bool = False

    @property
    def values(self) -> tuple[int, ...]:
        """All values that it makes or reads by slabs."""
        return self.base, *(value for value, _ in self.reads)


@dataclass(frozen=True)
class SlabGraph:
    """A program with an axis."""

    graph: Graph  # the program; values and ops by number
    outputs: frozenset[int]  # values that the program returns
    scales: Mapping[int, Fraction]  # value on the axis -> its rows per row of the array where the axis begins
    sizes: Mapping[int, int]  # value on the axis -> its rows
    along: Mapping[int, AlongOp]  # by op on the axis
    effects: frozenset[int] = frozenset()  # ops that run in the order of their numbers

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for number, op in enumerate(self.graph.ops):
            for value in dict.fromkeys(op.inputs):
                found.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in found.items()}

    def maker(self, value: int, ops: Collection[int]) -> int | None:
        """The op in `ops` that makes a value by slabs; None if it is an input, or made whole."""
        made = self.graph.producer[value]
        return made if made is not None and made in ops and not self.along[made].reduces else None

    def reads_whole(self, op: int, value: int) -> bool:
        """Does an op on the axis read a value whole (too)?"""
        return self.graph.ops[op].inputs.count(value) > sum(one == value for one, _ in self.along[op].reads)


Place = tuple[tuple[int, int], ...]
"""A computation, from outside to inside: the number of an equation, and which of its computations; () is a program."""


@dataclass(frozen=True)
class Slabs:
    """The ops of a computation that run in slabs, and the values that their loops write."""

    # value, dim: where the axis begins: value id in the original computation, dimension
    value: int
    dim: int
    rows: int  # rows of that value in a slab
    ops: frozenset[int]  # ops that run in loops
    stored: frozenset[int]  # values that the loop that makes them writes for later loops
    on_host: frozenset[int]  # written values that are in host memory
    # (stored value, level of a loop that recomputes it nevertheless)
    recomputed_in: frozenset[tuple[int, int]] = frozenset()
    inside: Place = ()  # the computation; values and ops are numbered in its own jaxpr


@dataclass(frozen=True, eq=False)
class SlabLoop:
    """One loop over slabs; equal only to itself."""

    level: int  # number of walls before it
    ops: tuple[int, ...]  # in order
    reads: tuple[int, ...]  # values that it reads by slabs, from inputs or from arrays that earlier loops wrote
    writes: tuple[int, ...]  # values that it writes by slabs
    sums: tuple[int, ...]  # ops whose results it adds up
    spans: Mapping[int, Span]  # rows of each value on the axis in a trip, relative to the first row of its own slab

    def largest_op(self, graph: Graph) -> int:
        """Of its ops, the one that reads and writes most."""
        return max(self.ops, key=lambda op: graph.touched_nbytes(graph.ops[op]))


def slab_rows(graph: SlabGraph, slabs: Slabs, value: int) -> int:
    """Rows of a value in a slab."""
    scale = graph.scales[value]
    rows, rest = divmod(slabs.rows * scale.numerator, scale.denominator)
    assert not rest
    return rows


def spare_rows(rows: int, spans: Iterable[Span]) -> tuple[int, int]:
    """Rows of unspecified content that a value on the host has before its first row, and after its last slab.

    The first trip of a loop writes for a nonexistent trip, and the last one fetches for one.

    Args:
      rows: of the value, in a slab.
      spans: that loops read.
    """
    before, behind = rows, 0
    for low, high in spans:
        before, behind = max(before, -low), max(behind, high)
    return before, behind


def trips_of(graph: SlabGraph, slabs: Slabs) -> int:
    """Number of slabs that hold all rows of every array on the axis that the ops make or read."""
    values = {value for op in slabs.ops for value in graph.along[op].values}
    return max(-(-graph.sizes[value] // slab_rows(graph, slabs, value)) for value in values)


def least_rows(graph: SlabGraph, ops: Iterable[int]) -> int:
    """The smallest number of rows of a slab for which every value of these ops has a whole number of rows."""
    least = 1
    for op in ops:
        for value in graph.along[op].values:
            scale = graph.scales[value]
            while (least * scale).denominator != 1:
                least *= (least * scale).denominator
    return least


class Walls:
    """The levels of a program with some ops in loops; they do not depend on what the loops store.

    Of ops with effects none is on a lower level than those before it.

    Caches loops: most are the same if one more value is stored, or one less.
    """

    def __init__(self, graph: SlabGraph, ops: frozenset[int]):
        self.graph, self.ops = graph, ops
        self.levels: dict[int, int] = {}  # by op
        producer, reached = graph.graph.producer, 0
        for number, op in enumerate(graph.graph.ops):
            made = ((one, value) for value in op.inputs if (one := producer[value]) is not None)
            behind = (self.levels[one] + (one in ops and not self._by_slabs(number, value)) for one, value in made)
            self.levels[number] = max(behind, default=0)
            if number in graph.effects:
                self.levels[number] = reached = max(reached, self.levels[number])
        self._known: dict[tuple[int, int], list[_Known]] = {}
        self._known_rows: dict[tuple[int, int, int], int] = {}

    def _by_slabs(self, number: int, value: int) -> bool:
        """Does an op of a loop read a value only by slabs, which another op makes by slabs?"""
        return (
            number in self.ops
            and self.graph.maker(value, self.ops) is not None
            and not self.graph.reads_whole(number, value)
        )

    @cached_property
    def by_level(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """By level: ops outside of loops, and ops in them."""
        found: list[tuple[list[int], list[int]]] = [([], []) for _ in range(max(self.levels.values(), default=0) + 1)]
        for number, level in self.levels.items():
            found[level][number in self.ops].append(number)
        return found

    @cached_property
    def forced(self) -> frozenset[int]:
        """Values made by slabs that an op or the caller reads whole: they are always written."""
        made = (number for number in self.ops if not self.graph.along[number].reduces)
        return frozenset(
            value
            for number in made
            for value in self.graph.graph.ops[number].outputs
            if value in self.graph.outputs
            or any(not self._by_slabs(reader, value) for reader in self.graph.readers.get(value, ()))
        )

    def _rows(self, slabs: Slabs, value: int) -> int:
        """`slab_rows`, counted once."""
        known = slabs.value, slabs.rows, value
        if known not in self._known_rows:
            self._known_rows[known] = slab_rows(self.graph, slabs, value)
        return self._known_rows[known]

    def loops(self, slabs: Slabs) -> list[SlabLoop]:
        written, again = self.forced | slabs.stored, dict[int, set[int]]()
        for value, level in slabs.recomputed_in:
            again.setdefault(level, set()).add(value)
        made = (
            self._loop(level, slabs, written - again[level] if level in again else written)
            for level in range(len(self.by_level))
        )
        return [loop for loop in made if loop is not None]

    def _loop(self, level: int, slabs: Slabs, written: frozenset[int]) -> SlabLoop | None:
        known = self._known.setdefault((level, slabs.rows), [])
        for number, one in enumerate(known):
            if one.written <= written and one.others.isdisjoint(written):
                if number:
                    known.insert(0, known.pop(number))
                return one.loop
        asked: dict[int, bool] = {}
        loop = self._make(level, slabs, written, asked)
        written = frozenset(value for value, answer in asked.items() if answer)
        known.insert(0, _Known(written, frozenset(asked.keys() - written), loop))
        del known[_KEPT:]
        return loop

    def _make(self, level: int, slabs: Slabs, written: frozenset[int], asked: dict[int, bool]) -> SlabLoop | None:
        """The loop of a level; `asked` records the values for which it matters whether they are written."""

        def is_written(value: int) -> bool:
            return asked.setdefault(value, value in written)

        graph, along = self.graph.graph, self.graph.along
        sums = [number for number in self.by_level[level][1] if along[number].reduces]
        made = (number for number in self.by_level[level][1] if not along[number].reduces)
        writes = sorted(value for number in made for value in graph.ops[number].outputs if is_written(value))
        if not sums and not writes:
            return None
        spans = {value: (0, self._rows(slabs, value)) for value in writes}
        makers = (graph.producer[value] for value in writes)
        waiting = [-number for number in {*sums, *(number for number in makers if number is not None)}]
        heapq.heapify(waiting)
        ops, reads = list[int](), set[int]()
        while waiting:
            number = -heapq.heappop(waiting)
            if ops and ops[-1] == number:
                continue
            ops.append(number)
            one, outputs = along[number], graph.ops[number].outputs
            span = own = (0, self._rows(slabs, one.base))
            if not one.reduces:
                wanted = [spans[value] for value in outputs if value in spans]
                span = _union([*wanted, own] if one.carries else wanted)
                for value in outputs:
                    spans[value] = span
            for value, wants in one.reads:
                rows = wants.of(*span)
                spans[value] = _union([rows, spans[value]]) if value in spans else rows
                source = self.graph.maker(value, self.ops)
                if source is None or (self.levels[source] < level and is_written(value)):
                    reads.add(value)
                else:
                    heapq.heappush(waiting, -source)
        return SlabLoop(level, tuple(reversed(ops)), tuple(sorted(reads)), tuple(writes), tuple(sums), spans)


@dataclass(frozen=True)
class _Known:
    """A loop (or None), valid as long as `written` are written and `others` are not."""

    written: frozenset[int]
    others: frozenset[int]
    loop: SlabLoop | None


_KEPT = 16  # loops per level: search tries choices that differ by one value, or repeat


def _union(spans: Sequence[Span]) -> Span:
    first, *others = spans
    if not others:
        return first
    low, high = first
    for one in others:
        low, high = min(low, one[0]), max(high, one[1])
    return low, high


def arrange(graph: SlabGraph, slabs: Slabs) -> tuple[int | SlabLoop, ...]:
    """The program in order: numbers of ops that run whole, and loops."""
    walls = Walls(graph, slabs.ops)
    loops = {loop.level: loop for loop in walls.loops(slabs)}
    levels = enumerate(walls.by_level)
    return tuple(one for level, (outside, _) in levels for one in (*outside, loops.get(level)) if one is not None)
