"""What a program in slabs takes: seconds by the streams of its loops, bytes on device and host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import op_seconds
from memplan.planning.slabs import SlabGraph, SlabLoop, Slabs, Walls, slab_rows, trips_of

_LAUNCH_S = 1e-5  # of a kernel in a loop, and of the trip around it


@dataclass(frozen=True)
class Price:
    """What a program in slabs takes.

    Attributes:
      seconds: of its loops and its other ops.
      device_bytes: of a trip of a loop, what is stored on the device and what is resident, at the most.
      host_bytes: of what is stored on the host, at the most.
    """

    seconds: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class SlabLimits:
    """Bytes that may be taken, and the bytes that are resident in any case (arguments, outputs)."""

    device_bytes: int
    host_bytes: int
    resident_bytes: int

    def excess(self, price: Price) -> int:
        """Bytes beyond them."""
        return max(price.device_bytes - self.device_bytes, 0) + max(price.host_bytes - self.host_bytes, 0)

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
        """Copies each way and kernels go on beside one another."""
        return max(self.read, self.written, self.kernels) + trips * self.launches * _LAUNCH_S


@dataclass(frozen=True)
class Pricer:
    """Prices on a device, for one axis."""

    graph: SlabGraph
    device: Device

    @cached_property
    def op_seconds(self) -> Sequence[float]:
        """By op. Elementwise ones take nothing: they are fused into their readers."""
        graph = self.graph.graph
        return [op_seconds(graph, op, self.device) if _is_kernel(op.fusion) else 0.0 for op in graph.ops]

    def copy_seconds(self, value: int) -> float:
        """Of a whole value, one way."""
        return copy_seconds(self.graph.graph.nbytes(value), self.device)

    def price(
        self,
        slabs: Slabs,
        limits: SlabLimits,
        whole: Mapping[int, int],
        read_whole: Mapping[int, int],
        arranged: Sequence[int | SlabLoop],
    ) -> Price:
        """What it takes.

        Args:
          whole: what is there besides, by level (`whole_nbytes`).
          read_whole: what is read whole.
          arranged: the program in order.
        """
        loops = [one for one in arranged if isinstance(one, SlabLoop)]
        host = [0] * len(loops)
        device = [limits.resident_bytes + self.trip_bytes(loop, slabs) + whole[loop.level] for loop in loops]
        for value, (first, last) in lifetimes(loops, read_whole).items():
            there = host if value in slabs.on_host else device
            for loop in range(first, last):
                there[loop] += self.graph.graph.nbytes(value)
        trips = trips_of(self.graph, slabs)
        seconds = sum(self.op_seconds[one] for one in arranged if not isinstance(one, SlabLoop))
        seconds += sum(self.streams(loop, slabs).seconds(trips) for loop in loops)
        return Price(seconds, max(device, default=0), max(host, default=0))

    def streams(self, loop: SlabLoop, slabs: Slabs) -> Streams:
        read = sum(self.copy_seconds(value) for value in loop.reads if value in slabs.on_host)
        written = sum(self.copy_seconds(value) for value in loop.writes if value in slabs.on_host)
        kernels = sum(self.op_seconds[number] * self._rim(number, loop, slabs) for number in loop.ops)
        return Streams(read, written, kernels, 1 + sum(self.op_seconds[number] > 0 for number in loop.ops))

    def _rim(self, number: int, loop: SlabLoop, slabs: Slabs) -> float:
        """The rows that an op makes in a trip, by those of a slab."""
        one = self.graph.along[number]
        if one.reduces:
            return 1.0
        low, high = loop.spans[one.base]
        return (high - low) / slab_rows(self.graph, slabs, one.base)

    def trip_bytes(self, loop: SlabLoop, slabs: Slabs) -> int:
        """Of one trip: windows and slabs that are copied twice over, and the op that has most at once.

        XLA lays an array on the device that kernels read by slabs out anew as they want it, whole and before the loop.
        """
        graph = self.graph.graph
        anew = sum(graph.nbytes(value) for value in loop.reads if value not in slabs.on_host)
        copied = 2 * sum(self._window(value, loop) for value in (*loop.reads, *loop.writes))
        return anew + copied + max((self._touched(number, loop) for number in loop.ops), default=0)

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


def whole_nbytes(walls: Walls) -> Mapping[int, int]:
    """By level, the bytes of what kernels outside of all loops have made and others there still read.

    What is elementwise counts as what it is made of.
    """
    graph, levels = walls.graph.graph, walls.levels
    ops, producer = graph.ops, graph.producer
    ends: dict[int, int] = {}  # by value, the last level at which a kernel or a loop reads it
    for number in reversed(range(len(ops))):
        op = ops[number]
        passes_on = number not in walls.ops and not _is_kernel(op.fusion)
        end = max((ends.get(value, 0) for value in op.outputs), default=0) if passes_on else levels[number]
        for value in op.inputs:
            ends[value] = max(ends.get(value, 0), end)
    found = dict.fromkeys(range(max(levels.values(), default=0) + 1), 0)
    for value, end in ends.items():
        made = producer[value]
        if made is not None and made not in walls.ops and ops[made].fusion == "kernel":
            for level in range(levels[made], end):
                found[level] += graph.nbytes(value)
    return found


def _is_kernel(fusion: str) -> bool:
    return fusion in ("kernel", "reduction")


def lifetimes(loops: Sequence[SlabLoop], whole: Mapping[int, int]) -> Mapping[int, tuple[int, int]]:
    """Of what loops write: from the loop that writes it until behind the last that reads it.

    Args:
      whole: value -> the last level at which somebody reads it whole.
    """
    found: dict[int, tuple[int, int]] = {}
    for number, loop in enumerate(loops):
        found.update((value, (number, number + 1)) for value in loop.writes)
        found.update((value, (found[value][0], number + 1)) for value in loop.reads if value in found)
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
