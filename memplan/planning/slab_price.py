"""What a program in slabs takes: seconds by the streams of its loops, bytes on device and host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import op_seconds
from memplan.planning.rows import Span
from memplan.planning.slabs import SlabGraph, SlabLoop, Slabs, Walls, slab_rows, spare_rows, trips_of

_LAUNCH_S = 1e-5  # of a kernel in a loop, and of the trip around it


@dataclass(frozen=True)
class Price:
    """What a program in slabs takes."""

    seconds: float  # of its loops and its other ops
    device_bytes: int  # of a trip of a loop, what is stored on the device and what is resident, at the most
    host_bytes: int  # of what is stored on the host, at the most


@dataclass(frozen=True)
class SlabLimits:
    """Bytes that may be taken, and the bytes that are resident in any case (arguments, outputs)."""

    device_bytes: int
    host_bytes: int
    resident_bytes: int

    def excess(self, price: Price) -> int:
        """Bytes beyond them."""
        return max(price.device_bytes - self.device_bytes, 0) + max(price.host_bytes - self.host_bytes, 0)

    def fits(self, price: Price) -> bool:
        return self.excess(price) == 0

    def less(self, part: float) -> SlabLimits:
        """With a part of the bytes of the device."""
        return replace(self, device_bytes=int(part * self.device_bytes))

    def order(self, price: Price) -> tuple[int, float]:
        """What fits before what does not, then the fastest."""
        return self.excess(price), price.seconds


class Streams(NamedTuple):
    """Seconds of a loop's copies to the device, of those to the host, of its kernels; what a trip launches."""

    read: float
    written: float
    kernels: float
    launches: int

    def seconds(self, trips: int) -> float:
        """Copies each way and kernels go on beside one another, but for the first slab and the last."""
        beside = max(self.read, self.written, self.kernels)
        return beside + (self.read + self.written) / trips + trips * self.launches * _LAUNCH_S


class _Work(NamedTuple):
    """Of a loop, wherever what it reads and writes lies: seconds of its kernels; launches and bytes of a trip."""

    kernels: float
    launches: int
    nbytes: int


@dataclass(frozen=True)
class Pricer:
    """Prices on a device, for one axis."""

    graph: SlabGraph
    device: Device

    @cached_property
    def op_seconds(self) -> Sequence[float]:
        """By op. Elementwise ones are fused into their readers, and take nothing unless those are kernels."""
        graph = self.graph.graph
        lies = [_is_kernel(op.fusion) or not self._operands.isdisjoint(op.outputs) for op in graph.ops]
        return [op_seconds(graph, op, self.device) if one else 0.0 for op, one in zip(graph.ops, lies, strict=True)]

    @cached_property
    def copy_seconds(self) -> Sequence[float]:
        """By value: of a whole one, one way."""
        return [copy_seconds(value.nbytes, self.device) for value in self.graph.graph.values]

    def price(
        self,
        slabs: Slabs,
        limits: SlabLimits,
        whole: Outside,
        read_whole: Mapping[int, int],
        loops: Sequence[SlabLoop],
    ) -> Price:
        """What it takes.

        Args:
          whole: what is there besides (`outside`).
          read_whole: what is read whole.
          loops: in order.
        """
        host = [0] * len(loops)
        device = [
            limits.resident_bytes + self.trip_bytes(loop, slabs) + more
            for loop, more in zip(loops, whole.beside(loops), strict=True)
        ]
        for value, (first, last) in self.anew(loops).items():
            for loop in range(first, last):
                device[loop] += self.graph.graph.nbytes(value)
        spans = defaultdict[int, list[Span]](list)  # of what is on the host, as loops read it
        for loop in loops:
            for value in loop.reads:
                if value in slabs.on_host:
                    spans[value].append(loop.spans[value])
        for value, (first, last) in lifetimes(loops, read_whole).items():
            on_host, nbytes = value in slabs.on_host, self.graph.graph.nbytes(value)
            there = host if on_host else device
            more = self._spare(value, slabs, spans.get(value, ())) if on_host else 0
            for loop in range(first, last):
                there[loop] += nbytes + more
        trips = self._trips(slabs)
        seconds = whole.seconds + sum(self.streams(loop, slabs).seconds(trips) for loop in loops)
        return Price(seconds, max(device, default=0), max(host, default=0))

    def _spare(self, value: int, slabs: Slabs, spans: Iterable[Span]) -> int:
        """Bytes on the host besides the rows that the value has."""
        rows, size = slab_rows(self.graph, slabs, value), self.graph.sizes[value]
        spare = sum(spare_rows(rows, spans)) + self._trips(slabs) * rows - size
        return self.graph.graph.nbytes(value) * spare // size

    def streams(self, loop: SlabLoop, slabs: Slabs) -> Streams:
        read = sum([self.copy_seconds[value] for value in loop.reads if value in slabs.on_host])
        written = sum([self.copy_seconds[value] for value in loop.writes if value in slabs.on_host])
        work = self._work(loop, slabs)
        return Streams(read, written, work.kernels, work.launches)

    def trip_bytes(self, loop: SlabLoop, slabs: Slabs) -> int:
        """Of one trip: windows and slabs that are copied twice over, and the op that has most at once."""
        return self._work(loop, slabs).nbytes

    def _trips(self, slabs: Slabs) -> int:
        key = slabs.rows, slabs.ops
        if key not in self._known_trips:
            self._known_trips[key] = trips_of(self.graph, slabs)
        return self._known_trips[key]

    def _work(self, loop: SlabLoop, slabs: Slabs) -> _Work:
        if loop not in self._known_work:
            seconds = [self.op_seconds[number] for number in loop.ops]
            kernels = sum(one * self._made(number, loop, slabs) for number, one in zip(loop.ops, seconds, strict=True))
            copied = 2 * sum(self._window(value, loop) for value in (*loop.reads, *loop.writes))
            most = max((self._touched(number, loop) for number in loop.ops), default=0)
            self._known_work[loop] = _Work(kernels, 1 + sum(one > 0 for one in seconds), copied + most)
        return self._known_work[loop]

    @cached_property
    def _known_work(self) -> dict[SlabLoop, _Work]:
        return {}

    @cached_property
    def _known_trips(self) -> dict[tuple[int, frozenset[int]], int]:
        return {}

    def _made(self, number: int, loop: SlabLoop, slabs: Slabs) -> float:
        """The rows that an op makes in all trips, by those that there are: some twice, or behind the last."""
        one = self.graph.along[number]
        low, high = (0, slab_rows(self.graph, slabs, one.base)) if one.reduces else loop.spans[one.base]
        return (high - low) * self._trips(slabs) / self.graph.sizes[one.base]

    def anew(self, loops: Sequence[SlabLoop]) -> Mapping[int, tuple[int, int]]:
        """Arguments that kernels read by slabs: XLA lays them out as those want it once, whole and before the first."""
        graph, found = self.graph.graph, dict[int, tuple[int, int]]()
        for number, loop in enumerate(loops):
            for value in loop.reads:
                if graph.producer[value] is None and value in self._operands:
                    found[value] = found.get(value, (number, 0))[0], number + 1
        return found

    @cached_property
    def _operands(self) -> frozenset[int]:
        """What kernels read: it lies in memory, whatever makes it."""
        return frozenset(value for op in self.graph.graph.ops if op.fusion == "kernel" for value in op.inputs)

    def _touched(self, number: int, loop: SlabLoop) -> int:
        """Rows that a kernel reads and makes, twice over: as they are, and as it wants them laid out."""
        op = self.graph.graph.ops[number]
        if op.fusion != "kernel":
            return 0
        touched = {value for value, _ in self.graph.along[number].reads}
        touched |= {value for value in op.outputs if value in loop.spans}
        return 2 * sum(self._window(value, loop) for value in touched)

    def _window(self, value: int, loop: SlabLoop) -> int:
        low, high = loop.spans[value]
        return self.graph.graph.nbytes(value) * (high - low) // self.graph.sizes[value]


@dataclass(frozen=True)
class Outside:
    """What is made outside of all loops, and of it what lies in memory."""

    seconds: float  # that its ops take
    nbytes: Mapping[int, int]  # value -> its bytes
    # value -> the first level whose loop it is there for, and the one behind the last that those need it for who read
    # it at home
    spans: Mapping[int, tuple[int, int]]
    by_level: Sequence[int]  # bytes by level

    def beside(self, loops: Sequence[SlabLoop]) -> list[int]:
        """Bytes beside each loop: some that make again what read it at home read it later."""
        found = [self.by_level[loop.level] for loop in loops]
        for value, last in {value: loop.level for loop in loops for value in loop.reads if value in self.spans}.items():
            for number, loop in enumerate(loops):
                if self.spans[value][1] <= loop.level <= last:
                    found[number] += self.nbytes[value]
        return found


def outside(walls: Walls, op_seconds: Sequence[float]) -> Outside:
    """What kernels make, and what kernels and loops read; what else is elementwise counts as what it is made of."""
    graph, levels = walls.graph.graph, walls.levels
    ops = graph.ops
    ends: dict[int, int] = {}  # by value
    stored = set[int]()
    for number in reversed(range(len(ops))):
        op = ops[number]
        melts = number not in walls.ops and not _is_kernel(op.fusion) and stored.isdisjoint(op.outputs)
        end = levels[number] + (number in walls.ops)
        if melts:
            end = max((ends.get(value, 0) for value in op.outputs), default=0)
        for value in op.inputs:
            ends[value] = max(ends.get(value, 0), end)
            if number in walls.ops or op.fusion == "kernel":
                stored.add(value)
    found = {value: (levels[one], ends[value]) for value, one in _lying(walls, stored) if value in ends}
    nbytes = {value: graph.nbytes(value) for value in found}
    by_level = [0] * (max(levels.values(), default=0) + 1)
    for value, span in found.items():
        for level in range(*span):
            by_level[level] += nbytes[value]
    seconds = sum(op_seconds[number] for whole, _ in walls.by_level for number in whole)
    return Outside(seconds, nbytes, found, by_level)


def _lying(walls: Walls, read: Collection[int]) -> Iterator[tuple[int, int]]:
    """What ops outside of the loops make, and those ops: what kernels make, or what is read and no mere constant."""
    graph, constant = walls.graph.graph, set[int]()
    for number, op in enumerate(graph.ops):
        if number in walls.ops:
            continue
        if not _is_kernel(op.fusion) and constant.issuperset(op.inputs):
            constant.update(op.outputs)
            continue
        yield from ((value, number) for value in op.outputs if op.fusion == "kernel" or value in read)


def _is_kernel(fusion: str) -> bool:
    return fusion in ("kernel", "reduction")


def lifetimes(loops: Sequence[SlabLoop], whole: Mapping[int, int]) -> Mapping[int, tuple[int, int]]:
    """Of what loops write: from the loop that writes it until behind the last that reads it.

    Args:
      whole: value -> the last level at which somebody reads it whole.
    """
    found: dict[int, tuple[int, int]] = {}
    for number, loop in enumerate(loops):
        for value in loop.writes:
            found[value] = number, number + 1
        for value in loop.reads:
            if value in found:
                found[value] = found[value][0], number + 1
    for value in found.keys() & whole.keys():
        first, last = found[value]
        found[value] = first, max(last, sum(loop.level < whole[value] for loop in loops))
    return found


def read_whole(walls: Walls) -> Mapping[int, int]:
    """What loops write and others read whole: value -> the last level at which they do."""
    graph, levels, found = walls.graph, walls.levels, dict[int, int]()
    for number in walls.ops:
        for value in graph.graph.ops[number].outputs if not graph.along[number].reduces else ():
            readers = [one for one in graph.readers.get(value, ()) if levels[one] > levels[number]]
            whole = [levels[one] for one in readers if one not in walls.ops or graph.reads_whole(one, value)]
            if whole or value in graph.outputs:
                found[value] = max(levels.values()) + 1 if value in graph.outputs else max(whole)
    return found
