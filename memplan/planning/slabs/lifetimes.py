"""Values in memory around the loops over slabs: in which loops, and their bytes there.

Slabs that a search compares differ in few loops. Only values that these read or write are counted
again (`Walls.arranged`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from memplan.planning.slabs.slabs import (
    Arranged,
    EarlierSlabs,
    LoopOverSlabs,
    Slabs,
    Walls,
    padding_rows,
)

KERNELS = ("kernel", "reduction")  # fusions that are kernels of their own


class Lifetime(NamedTuple):
    """A value in memory during the loops of the levels [first, end)."""

    first: int
    end: int
    nbytes: int
    on_host: bool = False
    is_stored: bool = False  # a loop writes it
    reads: int = 0  # loops that read it
    device_nbytes: int = 0  # of a value on the host: bytes of its rows on the device


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Bytes in memory during the loop of each level, beside those of a trip: shape (levels,)."""

    lifetimes: Mapping[int, Lifetime]  # by value that loops read or write
    around: np.ndarray  # of values that other ops make, and of arguments' transposed copies
    stored: np.ndarray  # of values that loops store on the device
    on_host: np.ndarray  # of values that loops store on the host


@dataclass(frozen=True)
class Lifetimes:
    """Lifetimes of values for one axis and the ops that run in loops."""

    walls: Walls
    _earlier: WeakKeyDictionary[EarlierSlabs, Occupancy] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    def occupancy(self, arranged: Arranged, slabs: Slabs) -> Occupancy:
        """What is in memory around the loops of slabs."""
        earlier = arranged.earlier
        if earlier not in self._earlier:
            self._earlier[earlier] = self._of_earlier(earlier)
        occupancy = self._earlier[earlier]
        if not arranged.changed:
            return occupancy
        reads = dict[int, list[int]]()  # by value that a changed loop reads or read: levels
        values = set[int]()
        for level in arranged.changed:
            before, loop = earlier.entries[level].loop, arranged.entries[level].loop
            if before is not None:
                values.update(before.reads, before.writes)
            if loop is not None:
                values.update(loop.writes)
                for value in loop.reads:
                    reads.setdefault(value, []).append(level)
        values.update(reads)
        for value in values:
            same = [at for at in earlier.reads.get(value, ()) if at not in arranged.changed]
            reads[value] = same + reads.get(value, [])
        loops = [entry.loop for entry in arranged.entries]
        return self._replaced(occupancy, self._lifetimes(slabs, loops, reads))

    def _of_earlier(self, earlier: EarlierSlabs) -> Occupancy:
        loops = [entry.loop for entry in earlier.entries]
        nothing = np.zeros(len(loops), np.int64)
        around = np.array(self.outside.by_level[: len(loops)], np.int64)
        reads = {value: () for loop in loops if loop is not None for value in loop.writes}
        lifetimes = self._lifetimes(earlier.slabs, loops, {**reads, **earlier.reads})
        return self._replaced(Occupancy({}, around, nothing, nothing), lifetimes)

    def _replaced(
        self, occupancy: Occupancy, lifetimes: Mapping[int, Lifetime | None]
    ) -> Occupancy:
        """With other lifetimes of some values; None: nothing of the value is in memory."""
        current = dict(occupancy.lifetimes)
        around, stored, on_host = (
            nbytes.copy() for nbytes in (occupancy.around, occupancy.stored, occupancy.on_host)
        )
        for value, lifetime in lifetimes.items():
            before = current.pop(value, None)
            if lifetime is not None:
                current[value] = lifetime
            for sign, added in ((-1, before), (1, lifetime)):
                if added is not None:
                    memory = on_host if added.on_host else stored if added.is_stored else around
                    memory[added.first : added.end] += sign * added.nbytes
                    stored[added.first : added.end] += sign * added.device_nbytes
        return Occupancy(current, around, stored, on_host)

    def _lifetimes(
        self,
        slabs: Slabs,
        loops: Sequence[LoopOverSlabs | None],
        reads: Mapping[int, Sequence[int]],
    ) -> dict[int, Lifetime | None]:
        """Lifetimes of values, by the levels whose loops read them."""
        return {value: self._lifetime(value, slabs, loops, at) for value, at in reads.items()}

    def _lifetime(
        self,
        value: int,
        slabs: Slabs,
        loops: Sequence[LoopOverSlabs | None],
        reads: Sequence[int],
    ) -> Lifetime | None:
        graph = self.walls.graph.graph
        nbytes = graph.nbytes(value)
        maker = graph.producer[value]
        if maker is None:
            # XLA transposes an argument that kernels read by slabs as a whole, before its first
            # loop.
            if reads and value in self.operands:
                return Lifetime(min(reads), max(reads) + 1, nbytes, reads=len(reads))
            return None
        if self.walls.graph.maker(value, self.walls.ops) is None:
            # loops that recompute the value's readers extend its lifetime
            end = self.outside.spans[value][1] if value in self.outside.spans else len(loops)
            if reads and end <= max(reads):
                return Lifetime(end, max(reads) + 1, nbytes, reads=len(reads))
            return None
        first = self.walls.levels[maker]
        loop = loops[first]
        if loop is None or value not in loop.writes:
            return None
        end = max([first, *reads]) + 1
        end = max(end, self.read_whole.get(value, end))
        if value not in slabs.on_host:
            return Lifetime(first, end, nbytes, False, True, len(reads))
        rows, device_rows = self._host_rows(value, slabs, first, [loops[at] for at in reads])
        size = self._size(value)
        on_host, on_device = nbytes * rows // size, nbytes * device_rows // size
        return Lifetime(first, end, on_host, True, True, len(reads), on_device)

    def _size(self, value: int) -> int:
        return self.walls.graph.sizes[value]

    def _host_rows(
        self, value: int, slabs: Slabs, writer: int, readers: Sequence[LoopOverSlabs | None]
    ) -> tuple[int, int]:
        """Rows of a value on the host, with padding, and its rows on the device.

        Args:
          writer: level of the loop that writes it.
        """
        walls = self.walls
        own = slabs.in_level(writer)
        trips = walls.trips(own)
        on_device = slabs.device_rows.get(value, 0)
        on_host = walls.rows(own, value) - on_device
        windows = (walls.host_window(slabs, value, writer, loop) for loop in readers if loop)
        return sum(padding_rows(on_host, windows)) + trips * on_host, trips * on_device

    @cached_property
    def operands(self) -> frozenset[int]:
        """Values that kernels read: they are in memory, whatever makes them."""
        kernels = (op for op in self.walls.graph.graph.ops if op.fusion == "kernel")
        return frozenset(value for op in kernels for value in op.inputs)

    @cached_property
    def read_whole(self) -> Mapping[int, int]:
        """Values that loops write and ops read whole -> the level at which the last op ends."""
        walls = self.walls
        graph = walls.graph
        levels = walls.levels
        end_level = dict[int, int]()
        for number in walls.ops:
            for value in graph.graph.ops[number].outputs if not graph.along[number].reduces else ():
                later = [op for op in graph.readers.get(value, ()) if levels[op] > levels[number]]
                whole = [op for op in later if op not in walls.ops or graph.reads_whole(op, value)]
                if value in graph.outputs:
                    end_level[value] = max(levels.values()) + 1
                elif whole:
                    end_level[value] = max(levels[op] + (op in walls.ops) for op in whole)
        return end_level

    @cached_property
    def outside(self) -> Outside:
        """Values of ops outside of the loops, and sums.

        A fused elementwise value stands for its operands.
        """
        walls = self.walls
        levels = walls.levels
        ops = walls.graph.graph.ops
        # by value: the level at which its last reader ends; values that kernels and loops read
        ends: dict[int, int] = {}
        read = set[int]()
        for number in reversed(range(len(ops))):
            op = ops[number]
            in_loop = number in walls.ops
            end = levels[number] + in_loop
            is_fused = op.fusion not in KERNELS and read.isdisjoint(op.outputs)
            if is_fused and not in_loop:  # it runs with its readers
                end = max((ends.get(value, 0) for value in op.outputs), default=0)
            for value in op.inputs:
                ends[value] = max(ends.get(value, 0), end)
                if in_loop or op.fusion == "kernel":
                    read.add(value)
        spans = dict[int, tuple[int, int]]()
        constant = set[int]()  # values that no kernel computes
        for number, op in enumerate(ops):
            if number in walls.ops:
                continue
            if op.fusion not in KERNELS and constant.issuperset(op.inputs):
                constant.update(op.outputs)
                continue
            for value in op.outputs:
                if value in ends and (op.fusion == "kernel" or value in read):
                    spans[value] = levels[number], ends[value]
        by_level = [0] * (max(levels.values(), default=0) + 1)
        nbytes = walls.graph.graph.nbytes
        for number in walls.ops:
            for value in walls.graph.sums(number):
                first = levels[number]
                by_level[first] += walls.graph.total_nbytes(value)
                if value in ends:
                    spans[value] = first + 1, ends[value]
                else:
                    by_level[first] -= nbytes(value)  # resident, as a result of the program
        for value, span in spans.items():
            for level in range(*span):
                by_level[level] += nbytes(value)
        return Outside(spans, by_level)


class Outside(NamedTuple):
    """Whole values in memory: those that ops outside of all loops make, and sums."""

    spans: Mapping[int, tuple[int, int]]  # value -> [first, end) levels of its lifetime
    by_level: Sequence[int]  # by level: bytes
