"""A program in slabs: ops that run slab by slab in loops, and the values of these loops.

A loop computes ops over slabs of one axis: trip `t` makes rows `t * rows` to `(t + 1) * rows` of
every array on it. A reduction along the axis ends the loop; a new one follows. Such a reduction is
a *wall*, an op's *level* the number of walls before it, and there is one loop per level. A value of
an earlier level is read from the array that its loop wrote (`stored`), or recomputed.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from memplan.planning.graph import Graph, Rows, Span

# An operand has fewer elements than this. Above, cuDNN's 3D kernels fail or ask for 27 to 110 GiB
# of workspace.
MOST_ELEMENTS = 1 << 31
_TOTAL_ITEM_NBYTES = 4  # of an element of a sum, which is added up in float32 at least


@dataclass(frozen=True)
class AlongOp:
    """An op that may run in slabs."""

    # (value, rows of it that the op's rows read), for each input that is read by slabs
    reads: tuple[tuple[int, Rows], ...]
    # the value that counts the op's rows: a result, or an input if the op sums along the axis
    base: int
    reduces: bool  # are its results sums (or extremes) over all slabs?
    # does a row of its results need the row before it, from the previous trip if necessary?
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
    # value on the axis -> its rows per row of the array where the axis begins
    scales: Mapping[int, Fraction]
    sizes: Mapping[int, int]  # value on the axis -> its rows
    along: Mapping[int, AlongOp]  # by op on the axis
    effects: frozenset[int] = frozenset()  # ops that run in the order of their numbers

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        readers: dict[int, list[int]] = {}
        for number, op in enumerate(self.graph.ops):
            for value in dict.fromkeys(op.inputs):
                readers.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in readers.items()}

    def maker(self, value: int, ops: Collection[int]) -> int | None:
        """The op in `ops` that makes a value by slabs; None if it is an input, or made whole."""
        op = self.graph.producer[value]
        return op if op is not None and op in ops and not self.along[op].reduces else None

    def row_elements(self, value: int) -> int:
        """Elements of a row of a value on the axis."""
        return math.prod(self.graph.values[value].shape) // self.sizes[value]

    def sums(self, op: int) -> Sequence[int]:
        """The results that an op adds up over all slabs."""
        return self.graph.ops[op].outputs if self.along[op].reduces else ()

    def total_nbytes(self, value: int) -> int:
        """Bytes of a sum while it is added up, in float32 at least."""
        shape = self.graph.values[value].shape
        return max(self.graph.nbytes(value), _TOTAL_ITEM_NBYTES * math.prod(shape))

    def reads_whole(self, op: int, value: int) -> bool:
        """Does an op on the axis read a value whole (too)?"""
        slab_reads = sum(read == value for read, _ in self.along[op].reads)
        return self.graph.ops[op].inputs.count(value) > slab_reads


ComputationPath = tuple[tuple[int, int], ...]
"""A computation, from outside to inside: the number of an equation, and which of its computations.

() is the program itself.
"""


@dataclass(frozen=True)
class Slabs:
    """The ops of a computation that run in slabs, and the values that their loops write."""

    tag: ClassVar = "slabs"

    # value, dim: where the axis begins: value id in the original computation, dimension
    value: int
    dim: int
    rows: int  # rows of that value in a slab
    ops: frozenset[int]  # ops that run in loops
    stored: frozenset[int]  # values that the loop that makes them writes for later loops
    on_host: frozenset[int]  # written values that are in host memory
    # (stored value, level of a loop that recomputes it nevertheless)
    recomputed_in: frozenset[tuple[int, int]] = frozenset()
    # the computation; values and ops are numbered in its own jaxpr
    inside: ComputationPath = ()
    # (value on the host, number of first rows of each of its slabs that are on the device instead)
    on_device: frozenset[tuple[int, int]] = frozenset()
    # (level of a loop, number of slabs that it takes in a trip), if several
    at_once: frozenset[tuple[int, int]] = frozenset()

    def in_level(self, level: int) -> Slabs:
        """These slabs as the loop of a level takes them: several as one."""
        count = self.slabs_at_once.get(level, 1)
        return self if count == 1 else replace(self.narrow, rows=self.rows * count)

    @property
    def narrow(self) -> Slabs:
        """These slabs, with one in a trip of every loop."""
        return replace(self, at_once=frozenset())

    @cached_property
    def slabs_at_once(self) -> Mapping[int, int]:
        """Level -> slabs that its loop takes in a trip, if several."""
        return dict(self.at_once)

    @cached_property
    def device_rows(self) -> Mapping[int, int]:
        """Value on the host -> first rows of each of its slabs that are on the device instead."""
        return dict(self.on_device)

    def without(self, value: int) -> Slabs:
        """These slabs, with a value recomputed by all that read it."""
        return replace(
            self,
            stored=self.stored - {value},
            on_host=self.on_host - {value},
            recomputed_in=frozenset(pair for pair in self.recomputed_in if pair[0] != value),
            on_device=frozenset(pair for pair in self.on_device if pair[0] != value),
        )

    @property
    def uses_host(self) -> bool:
        """Does the program copy between host and device for them?"""
        return bool(self.on_host)


@dataclass(frozen=True, eq=False)
class LoopOverSlabs:
    """One loop over slabs; equal only to itself."""

    level: int  # number of walls before it
    ops: tuple[int, ...]  # in order
    # values that it reads by slabs, from inputs or from arrays that earlier loops wrote
    reads: tuple[int, ...]
    writes: tuple[int, ...]  # values that it writes by slabs
    sums: tuple[int, ...]  # ops whose results it adds up
    # rows of each value on the axis in a trip, relative to the first row of its own slab
    spans: Mapping[int, Span]

    def largest_elements(self, graph: SlabGraph) -> int:
        """Elements of the largest window that one of its kernels reads or makes."""
        kernels = (op for op in self.ops if graph.graph.ops[op].fusion == "kernel")
        values = {value for op in kernels for value in graph.along[op].values} & self.spans.keys()
        spans = ((value, *self.spans[value]) for value in values)
        return max(
            (graph.row_elements(value) * (high - low) for value, low, high in spans), default=0
        )

    def largest_op(self, graph: Graph) -> int:
        """Of its ops, the one that reads and writes most."""
        return max(self.ops, key=lambda op: graph.touched_nbytes(graph.ops[op]))


def slab_rows(graph: SlabGraph, slabs: Slabs, value: int) -> int:
    """Rows of a value in a slab."""
    scale = graph.scales[value]
    rows, remainder = divmod(slabs.rows * scale.numerator, scale.denominator)
    assert not remainder
    return rows


def device_share(graph: SlabGraph, slabs: Slabs, value: int) -> float:
    """The share of a value on the host whose rows are on the device instead."""
    rows = slabs.device_rows.get(value, 0)
    return rows / slab_rows(graph, slabs, value) if rows else 0.0


def host_span(span: Span, rows: int, on_device: int) -> Span:
    """The rows of a span that are on the host, counted among those on the host only.

    Args:
      rows: of the value, in a slab.
      on_device: first rows of each slab that are on the device.
    """
    low, high = (divmod(row, rows) for row in span)
    on_host = rows - on_device
    return (
        low[0] * on_host + max(low[1] - on_device, 0),
        high[0] * on_host + max(high[1] - on_device, 0),
    )


def padding_rows(rows: int, spans: Iterable[Span]) -> tuple[int, int]:
    """Padding rows of a host value, before its first row and after its last slab.

    With them the first delayed write and the last prefetch of a loop stay in bounds. Their content
    is unspecified.

    Args:
      rows: of the value, in a slab.
      spans: that loops read.
    """
    before = rows
    after = 0
    for low, high in spans:
        before = max(before, -low)
        after = max(after, high)
    return before, after


def wide_levels(slabs: Slabs, loops: Sequence[LoopOverSlabs]) -> set[int]:
    """The levels whose loops may take several slabs in a trip.

    What other loops read by slabs must not be stacked by such a loop: a stack has the slabs of the
    loop that wrote it. Arrays on the host have rows.
    """
    read = {value for loop in loops for value in loop.reads}
    stacked = read - (slabs.on_host - slabs.device_rows.keys())
    return {
        loop.level
        for loop in loops
        if stacked.isdisjoint(loop.writes) and slabs.device_rows.keys().isdisjoint(loop.reads)
    }


def trips_of(graph: SlabGraph, slabs: Slabs) -> int:
    """Number of slabs that hold all rows of every array on the axis that the ops make or read."""
    values = {value for op in slabs.ops for value in graph.along[op].values}
    return max(-(-graph.sizes[value] // slab_rows(graph, slabs, value)) for value in values)


def least_rows(graph: SlabGraph, ops: Iterable[int]) -> int:
    """The smallest number of rows of a slab for which all values of these ops have whole rows."""
    rows = 1
    for op in ops:
        for value in graph.along[op].values:
            scale = graph.scales[value]
            while (rows * scale).denominator != 1:
                rows *= (rows * scale).denominator
    return rows


class Walls:
    """The levels of a program with some ops in loops; they do not depend on the stored values.

    Of ops with effects none is on a lower level than those before it.

    Caches loops: most stay the same if one more value is stored, or one less.
    """

    def __init__(self, graph: SlabGraph, ops: frozenset[int]):
        self.graph = graph
        self.ops = ops
        self.levels: dict[int, int] = {}  # by op
        effects_level = 0
        for number in range(len(graph.graph.ops)):
            self.levels[number] = max(self._levels_after_inputs(number), default=0)
            if number in graph.effects:
                effects_level = max(effects_level, self.levels[number])
                self.levels[number] = effects_level
        # by (level, rows of a slab), and by (value where the axis begins, rows of a slab, value)
        self._loop_cache: dict[tuple[int, int], list[_CachedLoop]] = {}
        self._rows_cache: dict[tuple[int, int, int], int] = {}
        self._trips_cache: dict[tuple[int, int], int] = {}  # by value and rows of a slab
        self._earlier: dict[int, EarlierSlabs] = {}  # by rows of a slab

    def _levels_after_inputs(self, number: int) -> Iterator[int]:
        """By input that an op makes: the lowest level at which an op may read it."""
        graph = self.graph.graph
        for value in graph.ops[number].inputs:
            producer = graph.producer[value]
            if producer is not None:
                is_wall = producer in self.ops and not self._by_slabs(number, value)
                yield self.levels[producer] + is_wall

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
        count = max(self.levels.values(), default=0) + 1
        ops: list[tuple[list[int], list[int]]] = [([], []) for _ in range(count)]
        for number, level in self.levels.items():
            ops[level][number in self.ops].append(number)
        return ops

    @cached_property
    def forced(self) -> frozenset[int]:
        """Values made by slabs that an op or the caller reads whole: they are always written."""
        forced = set[int]()
        for number in self.ops:
            if self.graph.along[number].reduces:
                continue
            for value in self.graph.graph.ops[number].outputs:
                readers = self.graph.readers.get(value, ())
                is_whole = any(not self._by_slabs(reader, value) for reader in readers)
                if value in self.graph.outputs or is_whole:
                    forced.add(value)
        return frozenset(forced)

    def rows(self, slabs: Slabs, value: int) -> int:
        """`slab_rows`, cached."""
        key = slabs.value, slabs.rows, value
        if key not in self._rows_cache:
            self._rows_cache[key] = slab_rows(self.graph, slabs, value)
        return self._rows_cache[key]

    def trips(self, slabs: Slabs) -> int:
        """`trips_of`, cached."""
        key = slabs.value, slabs.rows
        if key not in self._trips_cache:
            self._trips_cache[key] = trips_of(self.graph, slabs)
        return self._trips_cache[key]

    def host_window(self, slabs: Slabs, value: int, writer: int, reader: LoopOverSlabs) -> Span:
        """The rows of a value on the host that a loop reads in a trip.

        They are counted among those on the host only. The last row is that of the reader's last
        trip, counted from where the writer's last trip ends.

        Args:
          writer: level of the loop that writes the value.
        """
        own = slabs.in_level(writer)
        rows = self.rows(own, value)
        low, high = host_span(reader.spans[value], rows, slabs.device_rows.get(value, 0))
        read = slabs.in_level(reader.level)
        if own.rows != read.rows:
            high += self.trips(read) * self.rows(read, value) - self.trips(own) * rows
        return low, high

    def loops(self, slabs: Slabs) -> list[LoopOverSlabs]:
        return self.arranged(slabs).loops

    def arranged(self, slabs: Slabs) -> Arranged:
        """The loops of slabs, and where they differ from earlier slabs (`compare_with`)."""
        earlier = self._earlier.get(slabs.rows) or self.compare_with(slabs)
        stored = self.forced | slabs.stored
        changed = earlier.changed_levels(slabs, stored)
        if not changed:
            return Arranged(earlier, earlier.entries, changed)
        entries = list(earlier.entries)
        for level in changed:
            entries[level] = self._entry(level, slabs, stored)
        return Arranged(earlier, entries, changed)

    def concerned(self, slabs: Slabs, changed: Slabs) -> set[int]:
        """The values that matter for loops in which slabs of as many rows differ."""
        values = set[int]()
        before, after = self.arranged(slabs), self.arranged(changed)
        for level in {*before.changed, *after.changed}:
            for entry in (before.entries[level], after.entries[level]):
                values |= entry.written | entry.unwritten
        return values

    def compare_with(self, slabs: Slabs) -> EarlierSlabs:
        """Compare later slabs of as many rows with these: best if they differ in few values."""
        stored = self.forced | slabs.stored
        entries = [self._entry(level, slabs, stored) for level in range(len(self.by_level))]
        earlier = self._earlier[slabs.rows] = EarlierSlabs.of(slabs, stored, entries)
        return earlier

    def _entry(self, level: int, slabs: Slabs, stored: frozenset[int]) -> _CachedLoop:
        written = stored
        if slabs.recomputed_in:
            written = stored - {value for value, at in slabs.recomputed_in if at == level}
        slabs = slabs.in_level(level)
        cache = self._loop_cache.setdefault((level, slabs.rows), [])
        for number, entry in enumerate(cache):
            if entry.written <= written and entry.unwritten.isdisjoint(written):
                if number:
                    cache.insert(0, cache.pop(number))
                return entry
        queried: dict[int, bool] = {}
        loop = self._make(level, slabs, written, queried)
        required = frozenset(value for value, is_written in queried.items() if is_written)
        entry = _CachedLoop(required, frozenset(queried.keys() - required), loop)
        cache.insert(0, entry)
        del cache[_CACHED:]
        return entry

    def _make(
        self, level: int, slabs: Slabs, written: frozenset[int], queried: dict[int, bool]
    ) -> LoopOverSlabs | None:
        """The loop of a level, or None if it writes nothing.

        Args:
          queried: receives the values for which it matters whether they are written.
        """

        def is_written(value: int) -> bool:
            return queried.setdefault(value, value in written)

        graph = self.graph.graph
        along = self.graph.along
        level_ops = self.by_level[level][1]
        sums = tuple(number for number in level_ops if along[number].reduces)
        makers = [number for number in level_ops if not along[number].reduces]
        outputs = [(value, number) for number in makers for value in graph.ops[number].outputs]
        written_by = {value: number for value, number in sorted(outputs) if is_written(value)}
        if not sums and not written_by:
            return None
        ops = list[int]()
        reads = set[int]()
        spans = {value: (0, self.rows(slabs, value)) for value in written_by}
        needed_ops = _LastFirst((*sums, *written_by.values()))
        for number in needed_ops:
            ops.append(number)
            span = self._op_span(number, slabs, spans)
            for value, rows in along[number].reads:
                value_span = rows.of(*span)
                spans[value] = _union([value_span, spans[value]]) if value in spans else value_span
                source = self.graph.maker(value, self.ops)
                if source is None or (self.levels[source] < level and is_written(value)):
                    reads.add(value)
                else:
                    needed_ops.add(source)
        ops.reverse()
        inputs = tuple(sorted(reads))
        return LoopOverSlabs(level, tuple(ops), inputs, tuple(written_by), sums, spans)

    def _op_span(self, number: int, slabs: Slabs, spans: dict[int, Span]) -> Span:
        """The rows that an op makes in a trip, which become the spans of its results."""
        op = self.graph.along[number]
        slab = (0, self.rows(slabs, op.base))
        if op.reduces:
            return slab
        outputs = self.graph.graph.ops[number].outputs
        needed = [spans[value] for value in outputs if value in spans]
        span = _union([*needed, slab] if op.carries else needed)
        for value in outputs:
            spans[value] = span
        return span


class _LastFirst:
    """Ops, the last first and each once; earlier ones may be added on the way."""

    def __init__(self, ops: Iterable[int]) -> None:
        self._heap = [-number for number in ops]
        heapq.heapify(self._heap)

    def add(self, number: int) -> None:
        heapq.heappush(self._heap, -number)

    def __iter__(self) -> Iterator[int]:
        previous = None
        while self._heap:
            number = -heapq.heappop(self._heap)
            if number != previous:
                yield number
            previous = number


@dataclass(frozen=True)
class _CachedLoop:
    """A loop (or None), valid as long as `written` are written and `unwritten` are not."""

    written: frozenset[int]
    unwritten: frozenset[int]
    loop: LoopOverSlabs | None


_CACHED = 16  # loops per level: the search tries choices that differ by one value, or repeat


@dataclass(frozen=True, eq=False)
class EarlierSlabs:
    """Slabs with their loops, from which later slabs differ in few levels; equal only to itself."""

    slabs: Slabs
    stored: frozenset[int]  # forced values among them
    entries: Sequence[_CachedLoop]  # by level
    # by value: the levels for which it matters whether it is written, and where
    levels: Mapping[int, Sequence[int]]
    reads: Mapping[int, Sequence[int]]  # by value: the levels whose loops read it

    @staticmethod
    def of(slabs: Slabs, stored: frozenset[int], entries: Sequence[_CachedLoop]) -> EarlierSlabs:
        levels = defaultdict[int, list[int]](list)
        reads = defaultdict[int, list[int]](list)
        for level, entry in enumerate(entries):
            for value in (*entry.written, *entry.unwritten):
                levels[value].append(level)
            for value in entry.loop.reads if entry.loop else ():
                reads[value].append(level)
        return EarlierSlabs(slabs, stored, entries, levels, reads)

    def changed_levels(self, slabs: Slabs, stored: frozenset[int]) -> set[int]:
        """The levels whose loops, or the memories of their values, may differ."""
        earlier = self.slabs
        changed = {level for _, level in earlier.recomputed_in ^ slabs.recomputed_in}
        changed |= {level for level, _ in earlier.at_once ^ slabs.at_once}
        moved = {value for value, _ in earlier.on_device ^ slabs.on_device}
        for values in (self.stored ^ stored, earlier.on_host ^ slabs.on_host, moved):
            for value in values:
                changed.update(self.levels.get(value, ()))
        return changed


@dataclass(frozen=True)
class Arranged:
    """The loops of slabs, by level and relative to earlier slabs."""

    earlier: EarlierSlabs
    entries: Sequence[_CachedLoop]  # by level
    changed: Collection[int]  # levels whose loops may differ from those of the earlier slabs

    @property
    def loops(self) -> list[LoopOverSlabs]:
        return [entry.loop for entry in self.entries if entry.loop is not None]


def _union(spans: Sequence[Span]) -> Span:
    """The smallest span that contains all."""
    low, high = spans[0]
    for other_low, other_high in spans[1:]:
        low = min(low, other_low)
        high = max(high, other_high)
    return low, high


def arrange(graph: SlabGraph, slabs: Slabs) -> tuple[int | LoopOverSlabs, ...]:
    """The program in order: numbers of ops that run whole, and loops."""
    walls = Walls(graph, slabs.ops)
    loops = {loop.level: loop for loop in walls.loops(slabs)}
    parts = list[int | LoopOverSlabs]()
    for level, (outside, _) in enumerate(walls.by_level):
        parts += outside
        if level in loops:
            parts.append(loops[level])
    return tuple(parts)
