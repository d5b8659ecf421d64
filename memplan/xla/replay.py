"""Scheduled optimized HLO -> seconds of one step, replayed: a roofline per kernel, three streams.

The same account for every executable, whoever decided what it recomputes and offloads.

A memcpy goes on beside computation. A kernel of XLA that reads or writes host memory takes its place: XLA launches a
block of 128 threads for 512 elements, which for a slab of some MiB are more blocks than the SMs hold.

Left out: caches, elementwise arithmetic, launches, the conditions of loops, and what messages take of device memory's
bandwidth. A loop is one block: its body is replayed with idle streams and taken times its trip count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.hardware.roofline import copy_seconds, kernel_seconds
from memplan.xla.collectives.cost import Collective, collective, is_collective
from memplan.xla.host_copies import is_copy
from memplan.xla.kernel_cost import KernelCost, kernel_cost
from memplan.xla.module import BLOCKS, Computation, Instruction, Module, read_module

TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "add-dependency",
         "partition-id", "replica-id"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between device and host memory, or a message to other devices."""

    name: str  # of the instruction that starts it
    stream: str  # "out" to the host, "in" from it, "net" to other devices
    nbytes: int
    # start_s, end_s: on that stream
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Replay:
    """Time and copies of one step at the device's peak rates."""

    flops: float  # of matrix products and convolutions
    compute_s: float  # sum of the kernels' roofline seconds
    copied_out_nbytes: int  # bytes to the host
    copy_s: float  # seconds that the busier direction of the link is busy
    hidden_copy_s: float  # of these, seconds during which kernels run
    step_s: float  # seconds from the first kernel to the end of everything
    # collective_s, hidden_collective_s: seconds that the links between devices are busy; of these, while kernels run
    collective_s: float = 0.0
    hidden_collective_s: float = 0.0
    collectives: Mapping[Collective, int] = field(default_factory=dict)  # how often each collective runs
    # of every kernel by name, those in loops' bodies included, where one trip counts
    seconds: Mapping[str, float] = field(default_factory=dict)
    # the same for every loop, conditional and call as a whole
    blocks: Mapping[str, float] = field(default_factory=dict)
    # of every instruction by name, when it starts and ends on the compute stream; loops' bodies not included
    clock: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()  # by the time they start; loops' bodies not included
    stalls: frozenset[tuple[float, float]] = frozenset()  # when the compute stream waits; entries of `clock`


def replay(module: Module | str, device: Device, machine: Machine | None = None) -> Replay:
    """Replay the entry computation of a module, or of its text, on `device`, one of those of `machine`.

    Raises:
      UnreadableModuleError: the text is not a scheduled module.
    """
    read = read_module(module) if isinstance(module, str) else module
    streams = _Streams(read, device, machine, {}).run(read.entry_name)
    sums = streams.sums()
    directions = ((sums[f"{stream}_s"], sums[f"{stream}_hidden_s"]) for stream in ("out", "in"))
    copy_s, hidden_s = max(directions, key=lambda one: (round(one[0], 12), -one[1]))  # as busy: the less hidden one
    return Replay(
        flops=sums["flops"],
        compute_s=sums["compute_s"],
        copied_out_nbytes=int(sums["out_nbytes"]),
        copy_s=copy_s,
        hidden_copy_s=hidden_s,
        step_s=streams.end_s,
        collective_s=sums["net_s"],
        hidden_collective_s=sums["net_hidden_s"],
        collectives=streams.collectives,
        seconds=streams.seconds,
        blocks=streams.blocks,
        clock=streams.clock,
        transfers=tuple(sorted(streams.transfers, key=lambda one: one.start_s)),
        stalls=frozenset(streams.stalls),
    )


class _Streams:
    """The compute stream, one copy stream in each direction and the links, advanced instruction by instruction."""

    def __init__(
        self, module: Module, device: Device, machine: Machine | None, costs: dict[tuple[str, str], KernelCost]
    ) -> None:
        """`costs` of kernels, by name and opcode, is filled as they are needed, for all parts of one replay."""
        self._module, self._device, self._machine, self._costs = module, device, machine, costs
        self._clock = 0.0  # compute stream, seconds
        self.stalls: list[tuple[float, float]] = []  # of the compute stream
        self._copies: dict[str, list[tuple[float, float]]] = {"out": [], "in": [], "net": []}
        self._ready: dict[str, float] = {}  # copies under way -> when they end
        self._sums: dict[str, float] = defaultdict(float)
        self.collectives: Counter[Collective] = Counter()
        self.seconds: dict[str, float] = {}
        self.blocks: dict[str, float] = {}
        self.clock: dict[str, tuple[float, float]] = {}
        self.transfers: list[Transfer] = []

    def run(self, name: str) -> _Streams:
        body = self._module[name]
        for op in body.ops.values():
            start = self._clock
            self._step(body, op)
            self.clock[op.name] = start, self._clock
            if op.opcode in BLOCKS:
                self.blocks[op.name] = self._clock - start
        return self

    @property
    def end_s(self) -> float:
        return max([self._clock, *(copies[-1][1] for copies in self._copies.values() if copies)])

    def sums(self) -> dict[str, float]:
        """Totals, the copies' seconds included."""
        sums = self._sums.copy()
        for stream, copies in self._copies.items():
            for start, end in copies:
                sums[f"{stream}_s"] += end - start
                sums[f"{stream}_hidden_s"] += max(0.0, self._computed_s(end) - self._computed_s(start))
        return sums

    def _computed_s(self, time: float) -> float:
        """Seconds until `time` during which the compute stream was busy."""
        return min(time, self._clock) - sum(min(time, end) - start for start, end in self.stalls if start < time)

    def _step(self, body: Computation, op: Instruction) -> None:
        if op.opcode in FREE or '"AllocateBuffer"' in op.attributes:
            return
        if op.opcode == "while":
            trips = TRIPS.search(op.attributes)
            self._block(self._alone(op.attribute("body").lstrip("%")), int(trips[1]) if trips else 1)
        elif op.opcode == "conditional":
            self._block(max(map(self._alone, op.called), key=lambda branch: branch.end_s), 1)
        elif op.opcode == "call":
            self.run(op.called[0])
        elif op.opcode.endswith("-start"):
            self._start(body, op)
        elif op.opcode.endswith("-done"):
            self._wait(self._ready.pop(op.operands[0], self._clock))
        else:
            self._kernel(body, op)

    def _alone(self, name: str) -> _Streams:
        return _Streams(self._module, self._device, self._machine, self._costs).run(name)

    def _cost(self, body: Computation, op: Instruction) -> KernelCost:
        key = op.name, op.opcode
        if key not in self._costs:
            self._costs[key] = kernel_cost(self._module, body, op)
        return self._costs[key]

    def _block(self, part: _Streams, times: int) -> None:
        for key, value in part.sums().items():
            self._sums[key] += times * value
        for one, count in part.collectives.items():
            self.collectives[one] += times * count
        self.seconds.update(part.seconds)
        self.blocks.update(part.blocks)
        self._clock += times * part.end_s

    def _start(self, body: Computation, op: Instruction) -> None:
        done, _ = body.uses[op.name][0]
        wrapped = replace(op, opcode=op.opcode.removesuffix("-start"), shape=done.shape)
        if self._machine and is_collective(wrapped.opcode):
            self._ready[op.name] = self._send(self._machine, body, wrapped)
            return
        cost = self._cost(body, wrapped) if wrapped.opcode != "call" else None
        if cost and cost.is_host_copy:
            self._ready[op.name] = end = self._copy(op, cost)
            if not is_copy(self._module, op, self._device):
                self._wait(end)
        else:
            self._step(body, wrapped)

    def _copy(self, op: Instruction, cost: KernelCost) -> float:
        """When a copy ends that may start now."""
        end = self._clock
        for stream, nbytes in (("out", cost.out_nbytes), ("in", cost.in_nbytes)):
            if nbytes:
                start = max(self._clock, self._free(stream))
                end = start + copy_seconds(nbytes, self._device)
                self._copies[stream].append((start, end))
                self.transfers.append(Transfer(op.name, stream, nbytes, start, end))
                self._sums[f"{stream}_nbytes"] += nbytes
        return end

    def _send(self, machine: Machine, body: Computation, op: Instruction) -> float:
        """When a collective ends that may start now; the links serve one at a time."""
        operands = sum(body.ops[name].nbytes for name in op.operands)
        sent = collective(machine, op, operands)
        self.collectives[sent] += 1
        start, seconds = max(self._clock, self._free("net")), sent.seconds
        self.seconds[op.name] = seconds
        self._copies["net"].append((start, start + seconds))
        self.transfers.append(Transfer(op.name, "net", operands, start, start + seconds))
        return start + seconds

    def _free(self, stream: str) -> float:
        """When the links of a stream are free; each direction of the host's goes beside the other."""
        return max((end for _, end in self._copies[stream][-1:]), default=0.0)

    def _wait(self, until: float) -> None:
        if until > self._clock:
            self.stalls.append((self._clock, until))
            self._clock = until

    def _kernel(self, body: Computation, op: Instruction) -> None:
        """Run a kernel; everything waits for a collective, and for one that touches host memory, as for a copy."""
        if self._machine and is_collective(op.opcode):
            self._wait(self._send(self._machine, body, op))
            return
        cost = self._cost(body, op)
        if cost.is_host_copy:
            self._wait(self._copy(op, cost))
            return
        seconds = kernel_seconds(cost.flops, cost.dtype, cost.device_nbytes, self._device)
        self._clock += seconds
        self.seconds[op.name] = seconds
        self._sums["flops"] += cost.flops
        self._sums["compute_s"] += seconds
