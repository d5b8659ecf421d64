"""Seconds of a program in slabs, by the streams of its loops, and its bytes on device and host."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import Span, op_seconds
from memplan.planning.slabs.slabs import (
    LoopOverSlabs,
    SlabGraph,
    Slabs,
    Walls,
    padding_rows,
    slab_rows,
    trips_of,
)

_LAUNCH_S = 1e-5  # per kernel in a loop, and per trip
_KERNELS = ("kernel", "reduction")  # fusions that are kernels of their own


@dataclass(frozen=True)
class Price:
    """Seconds and bytes of a program in slabs."""

    seconds: float  # of its loops and of the ops outside of them
    device_bytes: int  # peak of a trip of a loop, values stored on the device, and resident bytes
    host_bytes: int  # peak of the values stored on the host


@dataclass(frozen=True)
class SlabLimits:
    """Budgets in bytes, and the bytes that are always resident (arguments, outputs)."""

    device_bytes: int
    host_bytes: int
    resident_bytes: int

    def excess(self, price: Price) -> int:
        """Bytes beyond the budgets."""
        device_excess = max(price.device_bytes - self.device_bytes, 0)
        return device_excess + max(price.host_bytes - self.host_bytes, 0)

    def fits(self, price: Price) -> bool:
        return self.excess(price) == 0

    def less(self, part: float) -> SlabLimits:
        """These limits with this fraction of the device's bytes."""
        return replace(self, device_bytes=int(part * self.device_bytes))

    def times(self, parts: int) -> SlabLimits:
        """The limits of this many devices as one."""
        return SlabLimits(
            parts * self.device_bytes,
            parts * self.host_bytes,
            parts * self.resident_bytes,
        )

    def order(self, price: Price) -> tuple[int, float]:
        """Key of `min`: the smallest excess, then the fastest."""
        return self.excess(price), price.seconds


class Streams(NamedTuple):
    """A loop's work, by stream."""

    # read, written: seconds of copies to the device, and to the host
    read: float
    written: float
    kernels: float  # seconds
    launches: int  # per trip

    def seconds(self, trips: int) -> float:
        """Copies in each direction and kernels overlap, except for the first and the last slab."""
        longest_s = max(self.read, self.written, self.kernels)
        ends_s = (self.read + self.written) / trips
        return longest_s + ends_s + trips * self.launches * _LAUNCH_S


class _Work(NamedTuple):
    """A loop's work, independent of where its values are stored."""

    kernels: float  # seconds
    launches: int  # per trip
    nbytes: int  # of a trip


@dataclass(frozen=True)
class Pricer:
    """Prices on a device, for one axis and the ops that run in loops."""

    walls: Walls
    device: Device
    _trip_cache: dict[int, int] = field(default_factory=dict, init=False)  # by rows of a slab
    _work_cache: dict[LoopOverSlabs, _Work] = field(default_factory=dict, init=False)

    @property
    def graph(self) -> SlabGraph:
        return self.walls.graph

    @cached_property
    def op_seconds(self) -> Sequence[float]:
        """By op. Elementwise ops fuse into their readers and cost 0, unless these are kernels."""
        graph = self.graph.graph
        seconds = []
        for op in graph.ops:
            is_stored = op.fusion in _KERNELS or not self._operands.isdisjoint(op.outputs)
            seconds.append(op_seconds(graph, op, self.device) if is_stored else 0.0)
        return seconds

    @cached_property
    def whole_seconds(self) -> float:
        """Time of the unsplit program."""
        return sum(seconds + _LAUNCH_S for seconds in self.op_seconds if seconds)

    @cached_property
    def copy_seconds(self) -> Sequence[float]:
        """One-way copy time of each value."""
        return [copy_seconds(value.nbytes, self.device) for value in self.graph.graph.values]

    def price(self, slabs: Slabs, limits: SlabLimits) -> Price:
        price = self.price_below(slabs, limits, math.inf)
        assert price is not None
        return price

    def price_below(self, slabs: Slabs, limits: SlabLimits, bound_s: float) -> Price | None:
        """The price; None, without counting bytes, if it is not below these seconds."""
        loops = self.walls.loops(slabs)
        nbytes = self.graph.graph.nbytes
        trips = self._trips(slabs)
        loops_s = sum(self.streams(loop, slabs).seconds(trips) for loop in loops)
        seconds = self.outside.seconds + loops_s
        if seconds >= bound_s:
            return None
        host_nbytes = [0] * len(loops)  # by loop
        device_nbytes = []
        for loop, outside_nbytes in zip(loops, self.outside.nbytes_during(loops), strict=True):
            trip_nbytes = self.trip_bytes(loop, slabs)
            device_nbytes.append(limits.resident_bytes + trip_nbytes + outside_nbytes)
        for value, (first, end) in self.relayouts(loops).items():
            for loop in range(first, end):
                device_nbytes[loop] += nbytes(value)
        spans = defaultdict[int, list[Span]](list)  # of values on the host, as loops read them
        for loop in loops:
            for value in loop.reads:
                if value in slabs.on_host:
                    spans[value].append(loop.spans[value])
        for value, (first, end) in self.lifetimes(loops).items():
            stored = device_nbytes
            stored_nbytes = nbytes(value)
            if value in slabs.on_host:
                rows = slab_rows(self.graph, slabs, value)
                size = self.graph.sizes[value]
                padding = sum(padding_rows(rows, spans.get(value, ()))) + trips * rows - size
                stored = host_nbytes
                stored_nbytes += stored_nbytes * padding // size
            for loop in range(first, end):
                stored[loop] += stored_nbytes
        return Price(seconds, max(device_nbytes, default=0), max(host_nbytes, default=0))

    def streams(self, loop: LoopOverSlabs, slabs: Slabs) -> Streams:
        read = sum([self.copy_seconds[value] for value in loop.reads if value in slabs.on_host])
        written = sum([self.copy_seconds[value] for value in loop.writes if value in slabs.on_host])
        work = self._work(loop, slabs)
        return Streams(read, written, work.kernels, work.launches)

    def trip_bytes(self, loop: LoopOverSlabs, slabs: Slabs) -> int:
        """Bytes of a trip: windows and slabs, each double-buffered, and those of the largest op."""
        return self._work(loop, slabs).nbytes

    def _trips(self, slabs: Slabs) -> int:
        if slabs.rows not in self._trip_cache:
            self._trip_cache[slabs.rows] = trips_of(self.graph, slabs)
        return self._trip_cache[slabs.rows]

    def _work(self, loop: LoopOverSlabs, slabs: Slabs) -> _Work:
        if loop not in self._work_cache:
            seconds = [self.op_seconds[number] for number in loop.ops]
            timed_ops = zip(loop.ops, seconds, strict=True)
            kernels_s = sum(op_s * self._row_ratio(op, loop, slabs) for op, op_s in timed_ops)
            launches = 1 + sum(op_s > 0 for op_s in seconds)
            windows = (self._window(value, loop) for value in (*loop.reads, *loop.writes))
            touched = (self._touched(number, loop) for number in loop.ops)
            nbytes = 2 * sum(windows) + max(touched, default=0)
            self._work_cache[loop] = _Work(kernels_s, launches, nbytes)
        return self._work_cache[loop]

    def _row_ratio(self, number: int, loop: LoopOverSlabs, slabs: Slabs) -> float:
        """Rows that an op makes in all trips, per row of its value.

        Some rows are made twice, others are padding.
        """
        along = self.graph.along[number]
        low = 0
        high = slab_rows(self.graph, slabs, along.base)
        if not along.reduces:
            low, high = loop.spans[along.base]
        return (high - low) * self._trips(slabs) / self.graph.sizes[along.base]

    def _touched(self, number: int, loop: LoopOverSlabs) -> int:
        """Bytes that a kernel reads and writes, twice: in their own layout, and in the kernel's."""
        op = self.graph.graph.ops[number]
        if op.fusion != "kernel":
            return 0
        values = {value for value, _ in self.graph.along[number].reads}
        values |= {value for value in op.outputs if value in loop.spans}
        return 2 * sum(self._window(value, loop) for value in values)

    def _window(self, value: int, loop: LoopOverSlabs) -> int:
        """Bytes of a value's rows in a trip."""
        low, high = loop.spans[value]
        return self.graph.graph.nbytes(value) * (high - low) // self.graph.sizes[value]

    @cached_property
    def _operands(self) -> frozenset[int]:
        """Values that kernels read: they are in memory, whatever makes them."""
        kernels = (op for op in self.graph.graph.ops if op.fusion == "kernel")
        return frozenset(value for op in kernels for value in op.inputs)

    def relayouts(self, loops: Sequence[LoopOverSlabs]) -> Mapping[int, tuple[int, int]]:
        """Lifetimes, in loops, of transposed copies of arguments that kernels read by slabs.

        XLA transposes the whole argument before its first loop.
        """
        producer = self.graph.graph.producer
        spans = dict[int, tuple[int, int]]()
        for number, loop in enumerate(loops):
            for value in loop.reads:
                if producer[value] is None and value in self._operands:
                    first, _ = spans.get(value, (number, 0))
                    spans[value] = first, number + 1
        return spans

    def lifetimes(self, loops: Sequence[LoopOverSlabs]) -> Mapping[int, tuple[int, int]]:
        """Values that loops write -> [first, end) in loops.

        A lifetime is from the loop that writes the value to the last one that reads it.
        """
        spans: dict[int, tuple[int, int]] = {}
        for number, loop in enumerate(loops):
            for value in loop.writes:
                spans[value] = number, number + 1
            for value in loop.reads:
                if value in spans:
                    spans[value] = spans[value][0], number + 1
        for value in spans.keys() & self.read_whole.keys():
            first, end = spans[value]
            level = self.read_whole[value]
            spans[value] = first, max(end, bisect_left(loops, level, key=lambda loop: loop.level))
        return spans

    @cached_property
    def read_whole(self) -> Mapping[int, int]:
        """Values that loops write and ops read whole -> the last level that reads them so."""
        walls = self.walls
        graph = self.graph
        levels = self.walls.levels
        last_level = dict[int, int]()
        for number in walls.ops:
            for value in graph.graph.ops[number].outputs if not graph.along[number].reduces else ():
                later = [op for op in graph.readers.get(value, ()) if levels[op] > levels[number]]
                whole = [op for op in later if op not in walls.ops or graph.reads_whole(op, value)]
                if value in graph.outputs:
                    last_level[value] = max(levels.values()) + 1
                elif whole:
                    last_level[value] = max(levels[op] for op in whole)
        return last_level

    @cached_property
    def outside(self) -> Outside:
        """Ops outside of the loops. A fused elementwise value stands for its operands."""
        walls = self.walls
        levels = self.walls.levels
        ops = self.graph.graph.ops
        # by value: the level at which its last reader ends; values that kernels and loops read
        ends: dict[int, int] = {}
        read = set[int]()
        for number in reversed(range(len(ops))):
            op = ops[number]
            in_loop = number in walls.ops
            end = levels[number] + in_loop
            is_fused = op.fusion not in _KERNELS and read.isdisjoint(op.outputs)
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
            if op.fusion not in _KERNELS and constant.issuperset(op.inputs):
                constant.update(op.outputs)
                continue
            for value in op.outputs:
                if value in ends and (op.fusion == "kernel" or value in read):
                    spans[value] = levels[number], ends[value]
        nbytes = {value: self.graph.graph.nbytes(value) for value in spans}
        by_level = [0] * (max(levels.values(), default=0) + 1)
        for value, span in spans.items():
            for level in range(*span):
                by_level[level] += nbytes[value]
        seconds = sum(self.op_seconds[number] for whole, _ in walls.by_level for number in whole)
        return Outside(seconds, nbytes, spans, by_level)


@dataclass(frozen=True)
class Outside:
    """Ops outside of all loops, and those of their values that are in memory."""

    seconds: float  # of its ops
    nbytes: Mapping[int, int]  # by value
    spans: Mapping[int, tuple[int, int]]  # value -> [first, end) levels of its lifetime
    by_level: Sequence[int]  # by level: bytes

    def nbytes_during(self, loops: Sequence[LoopOverSlabs]) -> list[int]:
        """Bytes in memory during each loop.

        Loops that recompute a value's readers extend its lifetime.
        """
        nbytes = [self.by_level[loop.level] for loop in loops]
        last_level = {}
        for loop in loops:
            for value in loop.reads:
                if value in self.spans:
                    last_level[value] = loop.level
        for value, last in last_level.items():
            for number, loop in enumerate(loops):
                if self.spans[value][1] <= loop.level <= last:
                    nbytes[number] += self.nbytes[value]
        return nbytes
