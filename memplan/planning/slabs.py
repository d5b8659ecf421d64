"""A program in slabs: which of its ops run slab by slab in loops, and what the loops read, write and add up.

A loop computes ops over slabs of one axis: trip `t` makes rows `t * rows` up to `rows` further of every array on it.
What an op adds up along the axis is whole only after the loop: a wall, behind which another loop begins. So ops have
levels, and there is one loop per level. A value of an earlier level is read from where that level's loop wrote it
(`stored`), or made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from memplan.planning.graph import Graph
from memplan.planning.rows import Rows, Span


@dataclass(frozen=True)
class AlongOp:
    """An op that may run in slabs.

    Attributes:
      reads: by value, the rows of it that go with the op's own: for each input that is read by slabs.
      base: the value by whose rows the op counts: a result, or an input where the op adds up along the axis.
      reduces: its results are sums (or extremes) over all slabs.
    """

    reads: tuple[tuple[int, Rows], ...]
    base: int
    reduces: bool


@dataclass(frozen=True)
class SlabGraph:
    """A program with an axis through it.

    Attributes:
      graph: the program; values and ops by number.
      outputs: values that the program returns.
      scales: value on the axis -> its rows by rows of the array that the axis begins at.
      sizes: value on the axis -> its rows.
      along: op on the axis -> how.
    """

    graph: Graph
    outputs: frozenset[int]
    scales: Mapping[int, Fraction]
    sizes: Mapping[int, int]
    along: Mapping[int, AlongOp]

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for number, op in enumerate(self.graph.ops):
            for value in dict.fromkeys(op.inputs):
                found.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in found.items()}

    def maker(self, value: int, ops: Collection[int]) -> int | None:
        """The op of these that makes a value by slabs; None where it is given, or made whole."""
        made = self.graph.producer[value]
        return made if made is not None and made in ops and not self.along[made].reduces else None

    def reads_whole(self, op: int, value: int) -> bool:
        """An op on the axis reads a value not by slabs (alone)."""
        return self.graph.ops[op].inputs.count(value) > sum(one == value for one, _ in self.along[op].reads)


@dataclass(frozen=True)
class Slabs:
    """What runs in slabs.

    Attributes:
      value, dim: where the axis begins: value id in the program as it came, dimension.
      rows: rows of that value in a slab.
      ops: that run in loops.
      stored: values that the loop that makes them writes for later ones.
      on_host: of what is written, what is in host memory.
    """

    value: int
    dim: int
    rows: int
    ops: frozenset[int]
    stored: frozenset[int]
    on_host: frozenset[int]


@dataclass(frozen=True)
class SlabLoop:
    """One loop over slabs.

    Attributes:
      level: how many walls lie before it.
      ops: in order.
      reads: values that it reads by slabs from whole arrays, or from what earlier loops wrote.
      writes: values that it writes by slabs.
      sums: ops whose results it adds up.
      spans: the rows of each value on the axis that a trip has, counted from its own slab's first row.
    """

    level: int
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sums: tuple[int, ...]
    spans: Mapping[int, Span]


def slab_rows(graph: SlabGraph, slabs: Slabs, value: int) -> int:
    """Rows of a value in a slab."""
    scale = graph.scales[value]
    rows, rest = divmod(slabs.rows * scale.numerator, scale.denominator)
    assert not rest
    return rows


def trips_of(graph: SlabGraph, slabs: Slabs) -> int:
    """So many slabs hold all rows of every array on the axis that the ops make or read."""
    values = {value for op in slabs.ops for value in (graph.along[op].base, *(v for v, _ in graph.along[op].reads))}
    return max(-(-graph.sizes[value] // slab_rows(graph, slabs, value)) for value in values)


def least_rows(graph: SlabGraph, ops: Iterable[int]) -> int:
    """The smallest number of rows of a slab at which every value of these ops has whole rows."""
    least = 1
    for op in ops:
        for value in (graph.along[op].base, *(v for v, _ in graph.along[op].reads)):
            scale = graph.scales[value]
            while (least * scale).denominator != 1:
                least *= (least * scale).denominator
    return least


@dataclass
class _Arranger:
    graph: SlabGraph
    slabs: Slabs
    levels: dict[int, int] = field(default_factory=dict)  # by op

    def __post_init__(self) -> None:
        for number, op in enumerate(self.graph.graph.ops):
            self.levels[number] = max((self.behind(number, value) for value in op.inputs), default=0)

    def run(self) -> Iterator[int | SlabLoop]:
        outside: dict[int, list[int]] = {}
        for number, level in self.levels.items():
            if number not in self.slabs.ops:
                outside.setdefault(level, []).append(number)
        for level in range(max(self.levels.values(), default=0) + 1):
            yield from outside.get(level, ())
            loop = self.loop(level)
            if loop is not None:
                yield loop

    def behind(self, number: int, value: int) -> int:
        """The level at which an op can read a value."""
        made = self.graph.graph.producer[value]
        if made is None:
            return 0
        if made not in self.slabs.ops:
            return self.levels[made]
        return self.levels[made] + (not self.by_slabs(number, value))

    def by_slabs(self, number: int, value: int) -> bool:
        """An op of a loop reads a value by slabs, that another makes by slabs, and not whole as well."""
        return (
            number in self.slabs.ops
            and self.graph.maker(value, self.slabs.ops) is not None
            and not self.graph.reads_whole(number, value)
        )

    @cached_property
    def written(self) -> frozenset[int]:
        """Values made by slabs that are stored, or that somebody wants whole."""
        found = set[int]()
        for number in self.slabs.ops:
            if self.graph.along[number].reduces:
                continue
            for value in self.graph.graph.ops[number].outputs:
                readers = self.graph.readers.get(value, ())
                if (
                    value in self.slabs.stored
                    or value in self.graph.outputs
                    or any(not self.by_slabs(reader, value) for reader in readers)
                ):
                    found.add(value)
        return frozenset(found)

    def loop(self, level: int) -> SlabLoop | None:
        graph, along = self.graph.graph, self.graph.along
        own = [number for number in self.slabs.ops if self.levels[number] == level]
        sums = sorted(number for number in own if along[number].reduces)
        writes = sorted(value for number in own for value in graph.ops[number].outputs if value in self.written)
        if not sums and not writes:
            return None
        spans = {value: (0, slab_rows(self.graph, self.slabs, value)) for value in writes}
        wanted = {*sums, *(graph.producer[value] for value in writes)}
        ops, reads = [], set[int]()
        for number in range(max(one for one in wanted if one is not None), -1, -1):
            if number not in wanted:
                continue
            ops.append(number)
            one = along[number]
            rows = slab_rows(self.graph, self.slabs, one.base)
            made = [spans[value] for value in graph.ops[number].outputs if value in spans]
            span = (0, rows) if one.reduces else (min(low for low, _ in made), max(high for _, high in made))
            for value in graph.ops[number].outputs:
                if not one.reduces:
                    spans[value] = span
            for value, wants in one.reads:
                low, high = wants.of(*span)
                known = spans.get(value, (low, high))
                spans[value] = (min(low, known[0]), max(high, known[1]))
                source = self.graph.maker(value, self.slabs.ops)
                if source is None or self.is_read(value, level):
                    reads.add(value)
                else:
                    wanted.add(source)
        return SlabLoop(level, tuple(reversed(ops)), tuple(sorted(reads)), tuple(writes), tuple(sums), spans)

    def is_read(self, value: int, level: int) -> bool:
        """A loop at this level finds the value written."""
        made = self.graph.graph.producer[value]
        return made is not None and self.levels[made] < level and value in self.written


def arrange(graph: SlabGraph, slabs: Slabs) -> tuple[int | SlabLoop, ...]:
    """The program in order: numbers of ops that run whole, and loops."""
    return tuple(_Arranger(graph, slabs).run())


def levels_of(graph: SlabGraph, slabs: Slabs) -> Mapping[int, int]:
    """By op, how many walls lie before it."""
    return _Arranger(graph, slabs).levels
