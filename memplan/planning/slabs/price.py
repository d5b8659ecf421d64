"""Seconds of a program in slabs, by the streams of its loops, and its bytes on device and host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import op_seconds
from memplan.planning.slabs.lifetimes import KERNELS, Lifetimes
from memplan.planning.slabs.slabs import (
    Arranged,
    EarlierSlabs,
    LoopOverSlabs,
    SlabGraph,
    Slabs,
    Walls,
    device_share,
)

_LAUNCH_S = 1e-5  # per kernel in a loop, and per trip
# Count so many passes over a value in device memory, besides its kernels, where a loop reads it
# from the host or writes it there, and where it writes it to a stack: windows are joined and
# transposed, slabs cut and copied. Fitted to 173 loops of six U-Nets, 3.3, 3.2 and 2.4 passes were
# left. Of three other steps (ResNet-50 of batch 1,152 and 1,920, DeepLabV3+ 16,384^2), programs
# then take 1.03, 1.09 and 1.02 times their estimates.
_HOST_PASSES = 3
_STACK_PASSES = 2
# Limits are near each other if their bytes on the device differ by at most an eighth. Slabs of as
# many rows are then as fast as those of a new search (`Frontier`); with twice the bytes, slabs of
# twice the rows may take half the time.
_NEAR_PARTS = 8
_NO_LOOP = -(1 << 62)  # bytes of a trip of a level without a loop: the peak is elsewhere


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
    devices: int = 1  # that share the work: bytes are those of all of them

    def excess(self, price: Price) -> int:
        """Bytes beyond the budgets."""
        device_excess = max(price.device_bytes - self.device_bytes, 0)
        return device_excess + max(price.host_bytes - self.host_bytes, 0)

    def fits(self, price: Price) -> bool:
        return self.excess(price) == 0

    def are_near(self, other: SlabLimits) -> bool:
        difference = abs(other.device_bytes - self.device_bytes)
        return difference <= self.device_bytes // _NEAR_PARTS

    def less(self, part: float) -> SlabLimits:
        """These limits with this fraction of the device's bytes."""
        return replace(self, device_bytes=int(part * self.device_bytes))

    def times(self, parts: int) -> SlabLimits:
        """The limits of this many devices as one."""
        return SlabLimits(
            parts * self.device_bytes,
            parts * self.host_bytes,
            parts * self.resident_bytes,
            parts * self.devices,
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
    _work_cache: dict[LoopOverSlabs, _Work] = field(default_factory=dict, init=False)
    # by level: seconds of a loop, and bytes of a trip
    _earlier: WeakKeyDictionary[EarlierSlabs, tuple[list[float], np.ndarray]] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    @property
    def graph(self) -> SlabGraph:
        return self.walls.graph

    @cached_property
    def op_seconds(self) -> Sequence[float]:
        """By op. Elementwise ops fuse into their readers and cost 0, unless these are kernels."""
        graph = self.graph.graph
        seconds = []
        for op in graph.ops:
            is_stored = op.fusion in KERNELS or not self.lifetimes.operands.isdisjoint(op.outputs)
            seconds.append(op_seconds(graph, op, self.device) if is_stored else 0.0)
        return seconds

    @cached_property
    def lifetimes(self) -> Lifetimes:
        return Lifetimes(self.walls)

    @cached_property
    def outside_seconds(self) -> float:
        """Time of the ops outside of all loops."""
        return sum(self.op_seconds[number] for whole, _ in self.walls.by_level for number in whole)

    @cached_property
    def whole_seconds(self) -> float:
        """Time of the unsplit program."""
        return sum(seconds + _LAUNCH_S for seconds in self.op_seconds if seconds)

    @cached_property
    def copy_seconds(self) -> Sequence[float]:
        """One-way copy time of each value."""
        return [copy_seconds(value.nbytes, self.device) for value in self.graph.graph.values]

    @cached_property
    def pass_seconds(self) -> Sequence[float]:
        """Seconds in which each value is read or written once in device memory."""
        bandwidth = self.device.achieved_bandwidth
        return [value.nbytes / bandwidth for value in self.graph.graph.values]

    def price(self, slabs: Slabs, limits: SlabLimits) -> Price:
        price = self.price_below(slabs, limits, math.inf)
        assert price is not None
        return price

    def price_below(self, slabs: Slabs, limits: SlabLimits, bound_s: float) -> Price | None:
        """The price; None, without counting bytes, if it is not below these seconds."""
        arranged = self.walls.arranged(slabs)
        loops_s, _ = self._of_earlier(arranged.earlier)
        if arranged.changed:
            loops_s = loops_s.copy()
            for level in arranged.changed:
                loops_s[level] = self._loop_seconds(arranged.entries[level].loop, slabs)
        seconds = self.outside_seconds + sum(loops_s)
        if seconds >= bound_s:
            return None
        occupancy = self.lifetimes.occupancy(arranged, slabs)
        device_nbytes = occupancy.around + occupancy.stored + self.trip_nbytes(arranged, slabs)
        peak_nbytes = int(device_nbytes.max())
        return Price(
            seconds,
            limits.resident_bytes + peak_nbytes if peak_nbytes >= 0 else 0,
            int(occupancy.on_host.max()),
        )

    def trip_nbytes(self, arranged: Arranged, slabs: Slabs) -> np.ndarray:
        """Bytes of a trip by level, shape (levels,); far below zero without a loop."""
        _, trip_nbytes = self._of_earlier(arranged.earlier)
        if arranged.changed:
            trip_nbytes = trip_nbytes.copy()
            for level in arranged.changed:
                trip_nbytes[level] = self._loop_nbytes(arranged.entries[level].loop, slabs)
        return trip_nbytes

    def _of_earlier(self, earlier: EarlierSlabs) -> tuple[list[float], np.ndarray]:
        """By level: seconds of a loop, and bytes of a trip."""
        if earlier not in self._earlier:
            loops = [entry.loop for entry in earlier.entries]
            seconds = [self._loop_seconds(loop, earlier.slabs) for loop in loops]
            nbytes = [self._loop_nbytes(loop, earlier.slabs) for loop in loops]
            self._earlier[earlier] = seconds, np.array(nbytes, np.int64)
        return self._earlier[earlier]

    def _loop_seconds(self, loop: LoopOverSlabs | None, slabs: Slabs) -> float:
        if loop is None:
            return 0.0
        trips = self.walls.trips(slabs.in_level(loop.level))
        return self.streams(loop, slabs).seconds(trips)

    def _loop_nbytes(self, loop: LoopOverSlabs | None, slabs: Slabs) -> int:
        return _NO_LOOP if loop is None else self.trip_bytes(loop, slabs)

    def streams(self, loop: LoopOverSlabs, slabs: Slabs) -> Streams:
        read = self._copied_seconds(loop.reads, slabs)
        written = self._copied_seconds(loop.writes, slabs)
        work = self._work(loop, slabs)
        pass_s = self.pass_seconds
        both = (*loop.reads, *loop.writes)
        copied = [pass_s[value] for value in both if value in slabs.on_host]
        stacked = [pass_s[value] for value in loop.writes if value not in slabs.on_host]
        passes_s = _HOST_PASSES * sum(copied) + _STACK_PASSES * sum(stacked)
        return Streams(read, written, work.kernels + passes_s, work.launches)

    def _copied_seconds(self, values: Sequence[int], slabs: Slabs) -> float:
        """Seconds of one-way copies of the values that are on the host."""
        seconds = sum([self.copy_seconds[value] for value in values if value in slabs.on_host])
        for value in slabs.device_rows.keys() & values if slabs.on_device else ():
            seconds -= device_share(self.graph, slabs, value) * self.copy_seconds[value]
        return seconds

    def trip_bytes(self, loop: LoopOverSlabs, slabs: Slabs) -> int:
        """Bytes of a trip: windows and slabs, each double-buffered, and those of the largest op."""
        return self._work(loop, slabs).nbytes

    def _work(self, loop: LoopOverSlabs, slabs: Slabs) -> _Work:
        if loop not in self._work_cache:
            slabs = slabs.in_level(loop.level)
            seconds = [self.op_seconds[number] for number in loop.ops]
            timed_ops = zip(loop.ops, seconds, strict=True)
            kernels_s = sum(op_s * self._row_ratio(op, loop, slabs) for op, op_s in timed_ops)
            kernels_s += self.walls.trips(slabs) * self._adding_seconds(loop)
            launches = 1 + sum(op_s > 0 for op_s in seconds)
            windows = (self._window(value, loop) for value in (*loop.reads, *loop.writes))
            touched = (self._touched(number, loop) for number in loop.ops)
            nbytes = 2 * sum(windows) + max(touched, default=0)
            self._work_cache[loop] = _Work(kernels_s, launches, nbytes)
        return self._work_cache[loop]

    def _adding_seconds(self, loop: LoopOverSlabs) -> float:
        """Seconds of a trip in which parts of sums are written, read, and added to their totals."""
        graph = self.graph
        values = [value for number in loop.sums for value in graph.sums(number)]
        nbytes = sum(graph.graph.nbytes(value) + graph.total_nbytes(value) for value in values)
        return 2 * nbytes / self.device.achieved_bandwidth

    def _row_ratio(self, number: int, loop: LoopOverSlabs, slabs: Slabs) -> float:
        """Rows that an op makes in all trips, per row of its value.

        Some rows are made twice, others are padding.
        """
        along = self.graph.along[number]
        low = 0
        high = self.walls.rows(slabs, along.base)
        if not along.reduces:
            low, high = loop.spans[along.base]
        return (high - low) * self.walls.trips(slabs) / self.graph.sizes[along.base]

    def _touched(self, number: int, loop: LoopOverSlabs) -> int:
        """Bytes that a kernel reads and writes, twice: in their own layout, and in the kernel's."""
        op = self.graph.graph.ops[number]
        if op.fusion != "kernel":
            return 0
        values = {value for value, _ in self.graph.along[number].reads}
        values |= {value for value in op.outputs if value in loop.spans}
        parts_nbytes = sum(map(self.graph.graph.nbytes, self.graph.sums(number)))
        return 2 * sum(self._window(value, loop) for value in values) + parts_nbytes

    def _window(self, value: int, loop: LoopOverSlabs) -> int:
        """Bytes of a value's rows in a trip."""
        low, high = loop.spans[value]
        return self.graph.graph.nbytes(value) * (high - low) // self.graph.sizes[value]
