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
from memplan.planning.slabs.slabs import SlabGraph, SlabLoop, Slabs, Walls, slab_rows, spare_rows, trips_of

_LAUNCH_S = 1e-5  # per kernel in a loop, and per trip
_KERNELS = ("kernel", "reduction")  # fusions that are kernels of their own


@dataclass(frozen=True)
class Price:
    """Seconds and bytes of a program in slabs."""

    seconds: float  # of its loops and its other ops
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
        return max(price.device_bytes - self.device_bytes, 0) + max(price.host_bytes - self.host_bytes, 0)

    def fits(self, price: Price) -> bool:
        return self.excess(price) == 0

    def less(self, part: float) -> SlabLimits:
        """These limits with this fraction of the device's bytes."""
        return replace(self, device_bytes=int(part * self.device_bytes))

    def times(self, parts: int) -> SlabLimits:
        """The limits of so many devices together."""
        return SlabLimits(parts * self.device_bytes, parts * self.host_bytes, parts * self.resident_bytes)

    def order(self, price: Price) -> tuple[int, float]:
        """Key of `min`: the smallest excess, then the fastest."""
        return self.excess(price), price.seconds


class Streams(NamedTuple):
    """Seconds of a loop's copies to the device, of those to the host and of its kernels; launches per trip."""

    read: float
    written: float
    kernels: float
    launches: int

    def seconds(self, trips: int) -> float:
        """Copies in each direction and kernels overlap, except for the first and the last slab."""
        longest = max(self.read, self.written, self.kernels)
        return longest + (self.read + self.written) / trips + trips * self.launches * _LAUNCH_S


class _Work(NamedTuple):
    """Seconds of a loop's kernels, launches and bytes of a trip, independent of where its values are stored."""

    kernels: float
    launches: int
    nbytes: int


@dataclass(frozen=True)
class Pricer:
    """Prices on a device, for one axis and the ops that run in loops."""

    walls: Walls
    device: Device
    _known_trips: dict[int, int] = field(default_factory=dict, init=False)  # by rows of a slab
    _known_work: dict[SlabLoop, _Work] = field(default_factory=dict, init=False)

    @property
    def graph(self) -> SlabGraph:
        return self.walls.graph

    @cached_property
    def op_seconds(self) -> Sequence[float]:
        """By op. Elementwise ops fuse into their readers and cost 0, unless these are kernels."""
        graph = self.graph.graph
        return [
            op_seconds(graph, op, self.device)
            if op.fusion in _KERNELS or not self._operands.isdisjoint(op.outputs)
            else 0.0
            for op in graph.ops
        ]

    @cached_property
    def whole_seconds(self) -> float:
        """Of all ops as they are, in no loop."""
        return sum(one + _LAUNCH_S for one in self.op_seconds if one)

    @cached_property
    def copy_seconds(self) -> Sequence[float]:
        """By value: of the whole array, one way."""
        return [copy_seconds(value.nbytes, self.device) for value in self.graph.graph.values]

    def price(self, slabs: Slabs, limits: SlabLimits) -> Price:
        price = self.price_below(slabs, limits, math.inf)
        assert price is not None
        return price

    def price_below(self, slabs: Slabs, limits: SlabLimits, most_seconds: float) -> Price | None:
        """The price; None, and no bytes are counted, where it is not below these seconds."""
        loops, nbytes, trips = self.walls.loops(slabs), self.graph.graph.nbytes, self._trips(slabs)
        seconds = self.outside.seconds + sum(self.streams(loop, slabs).seconds(trips) for loop in loops)
        if seconds >= most_seconds:
            return None
        host = [0] * len(loops)
        device = [
            limits.resident_bytes + self.trip_bytes(loop, slabs) + more
            for loop, more in zip(loops, self.outside.beside(loops), strict=True)
        ]
        for value, (first, last) in self.relayouts(loops).items():
            for loop in range(first, last):
                device[loop] += nbytes(value)
        spans = defaultdict[int, list[Span]](list)  # of values on the host, as loops read them
        for loop in loops:
            for value in loop.reads:
                if value in slabs.on_host:
                    spans[value].append(loop.spans[value])
        for value, (first, last) in self.lifetimes(loops).items():
            there, more = device, nbytes(value)
            if value in slabs.on_host:  # with rows in addition to the value's own
                rows, size = slab_rows(self.graph, slabs, value), self.graph.sizes[value]
                spare = sum(spare_rows(rows, spans.get(value, ()))) + trips * rows - size
                there, more = host, more + more * spare // size
            for loop in range(first, last):
                there[loop] += more
        return Price(seconds, max(device, default=0), max(host, default=0))

    def streams(self, loop: SlabLoop, slabs: Slabs) -> Streams:
        read = sum([self.copy_seconds[value] for value in loop.reads if value in slabs.on_host])
        written = sum([self.copy_seconds[value] for value in loop.writes if value in slabs.on_host])
        work = self._work(loop, slabs)
        return Streams(read, written, work.kernels, work.launches)

    def trip_bytes(self, loop: SlabLoop, slabs: Slabs) -> int:
        """Bytes of a trip: windows and slabs, each double-buffered, and those of the largest op."""
        return self._work(loop, slabs).nbytes

    def _trips(self, slabs: Slabs) -> int:
        if slabs.rows not in self._known_trips:
            self._known_trips[slabs.rows] = trips_of(self.graph, slabs)
        return self._known_trips[slabs.rows]

    def _work(self, loop: SlabLoop, slabs: Slabs) -> _Work:
        if loop not in self._known_work:
            seconds = [self.op_seconds[number] for number in loop.ops]
            kernels = sum(one * self._made(number, loop, slabs) for number, one in zip(loop.ops, seconds, strict=True))
            copied = 2 * sum(self._window(value, loop) for value in (*loop.reads, *loop.writes))
            most = max((self._touched(number, loop) for number in loop.ops), default=0)
            self._known_work[loop] = _Work(kernels, 1 + sum(one > 0 for one in seconds), copied + most)
        return self._known_work[loop]

    def _made(self, number: int, loop: SlabLoop, slabs: Slabs) -> float:
        """Rows that an op makes in all trips, per row of its value: some are made twice, or are padding."""
        one = self.graph.along[number]
        low, high = (0, slab_rows(self.graph, slabs, one.base)) if one.reduces else loop.spans[one.base]
        return (high - low) * self._trips(slabs) / self.graph.sizes[one.base]

    def _touched(self, number: int, loop: SlabLoop) -> int:
        """Bytes that a kernel reads and writes, twice: in their own layout, and in the kernel's."""
        op = self.graph.graph.ops[number]
        if op.fusion != "kernel":
            return 0
        touched = {value for value, _ in self.graph.along[number].reads}
        touched |= {value for value in op.outputs if value in loop.spans}
        return 2 * sum(self._window(value, loop) for value in touched)

    def _window(self, value: int, loop: SlabLoop) -> int:
        low, high = loop.spans[value]
        return self.graph.graph.nbytes(value) * (high - low) // self.graph.sizes[value]

    @cached_property
    def _operands(self) -> frozenset[int]:
        """Values that kernels read: they are in memory, whatever makes them."""
        return frozenset(value for op in self.graph.graph.ops if op.fusion == "kernel" for value in op.inputs)

    def relayouts(self, loops: Sequence[SlabLoop]) -> Mapping[int, tuple[int, int]]:
        """Lifetimes of copies of arguments that kernels read by slabs: XLA transposes one whole, before the first."""
        graph, found = self.graph.graph, dict[int, tuple[int, int]]()
        for number, loop in enumerate(loops):
            for value in loop.reads:
                if graph.producer[value] is None and value in self._operands:
                    found[value] = found.get(value, (number, 0))[0], number + 1
        return found

    def lifetimes(self, loops: Sequence[SlabLoop]) -> Mapping[int, tuple[int, int]]:
        """Values that loops write -> [first, end) in loops, from the loop that writes it to the last that reads it."""
        found: dict[int, tuple[int, int]] = {}
        for number, loop in enumerate(loops):
            for value in loop.writes:
                found[value] = number, number + 1
            for value in loop.reads:
                if value in found:
                    found[value] = found[value][0], number + 1
        for value in found.keys() & self.read_whole.keys():
            first, last = found[value]
            found[value] = first, max(last, bisect_left(loops, self.read_whole[value], key=lambda loop: loop.level))
        return found

    @cached_property
    def read_whole(self) -> Mapping[int, int]:
        """Values that loops write and others read whole -> the last level that reads them so."""
        walls, graph, levels = self.walls, self.graph, self.walls.levels
        found = dict[int, int]()
        for number in walls.ops:
            for value in graph.graph.ops[number].outputs if not graph.along[number].reduces else ():
                readers = [one for one in graph.readers.get(value, ()) if levels[one] > levels[number]]
                whole = [levels[one] for one in readers if one not in walls.ops or graph.reads_whole(one, value)]
                if whole or value in graph.outputs:
                    found[value] = max(levels.values()) + 1 if value in graph.outputs else max(whole)
        return found

    @cached_property
    def outside(self) -> Outside:
        """Ops outside of the loops. A fused elementwise value counts as the values that it is computed from."""
        walls, levels, ops = self.walls, self.walls.levels, self.graph.graph.ops
        ends: dict[int, int] = {}  # by value
        read = set[int]()  # by kernels and loops
        for number in reversed(range(len(ops))):
            op, in_loop = ops[number], number in walls.ops
            end = levels[number] + in_loop
            if not in_loop and op.fusion not in _KERNELS and read.isdisjoint(op.outputs):  # fused into its readers
                end = max((ends.get(value, 0) for value in op.outputs), default=0)
            for value in op.inputs:
                ends[value] = max(ends.get(value, 0), end)
                if in_loop or op.fusion == "kernel":
                    read.add(value)
        spans, constant = dict[int, tuple[int, int]](), set[int]()
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
    by_level: Sequence[int]  # by level

    def beside(self, loops: Sequence[SlabLoop]) -> list[int]:
        """Bytes in memory during each loop; loops that recompute a value's readers extend its lifetime."""
        found = [self.by_level[loop.level] for loop in loops]
        for value, last in {value: loop.level for loop in loops for value in loop.reads if value in self.spans}.items():
            for number, loop in enumerate(loops):
                if self.spans[value][1] <= loop.level <= last:
                    found[number] += self.nbytes[value]
        return found
