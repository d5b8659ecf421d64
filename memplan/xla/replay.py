"""Scheduled optimized HLO -> seconds of one step: kernel by kernel, replayed on three streams.

Every executable is replayed in the same way, whoever decided what it recomputes and offloads.

A memcpy runs concurrently with computation. A kernel of XLA that reads or writes host memory
occupies the compute stream: XLA launches a block of 128 threads for 512 elements, which for a slab
of some MiB are more blocks than the SMs hold.

A kernel takes what kernels of its class achieve (`memplan.hardware.roofline`), or what it took
itself if it ran on the device (`memplan calibrate MODULE:FACTORY`). Not modelled: caches,
elementwise arithmetic, launches, the conditions of loops, and the bandwidth of device memory that
messages take. A loop is one block: its body is replayed on idle streams, and its seconds are
multiplied by the trip count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.hardware.roofline import copy_seconds
from memplan.planning.clock import Clock
from memplan.xla.collectives.cost import Collective, collective, is_collective
from memplan.xla.host_copies import is_copy
from memplan.xla.kernel_cost import KernelCost, class_seconds, kernel_cost
from memplan.xla.kernel_fingerprint import kernel_fingerprint
from memplan.xla.module import BLOCKS, Computation, Instruction, Module
from memplan.xla.workspace import slower_s

_FREE = frozenset(  # opcodes that take no time
    """
    parameter constant tuple get-tuple-element bitcast opt-barrier after-all add-dependency
    partition-id replica-id
    """.split()  # noqa: SIM905
)


def is_free(op: Instruction) -> bool:
    """Does it take no time?"""
    return op.opcode in _FREE or op.is_allocation


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between device and host memory, or a message to other devices."""

    name: str  # of the instruction that starts it
    stream: str  # "out" to the host, "in" from it, "net" to other devices
    nbytes: int
    start_s: float  # on that stream
    end_s: float  # on that stream
    over: tuple[str, ...] = ()  # levels of the machine that a message crosses, outermost first


@dataclass(frozen=True)
class Replay:
    """Time and copies of one step."""

    flops: float  # of matrix products and convolutions
    compute_s: float  # sum of the kernels' seconds
    copied_out_nbytes: int  # to the host
    copy_s: float  # during which the busier direction of the link is busy
    hidden_copy_s: float  # the part of `copy_s` during which kernels run
    step_s: float  # from the first kernel to the end of everything
    collective_s: float = 0.0  # during which the links between devices are busy
    hidden_collective_s: float = 0.0  # the part of `collective_s` during which kernels run
    slower_s: float = 0.0  # of `compute_s`, by algorithms with less workspace than XLA's own
    # how often each collective runs
    collectives: Mapping[Collective, int] = field(default_factory=dict)
    # of every kernel by name; one trip of those in loops' bodies
    seconds: Mapping[str, float] = field(default_factory=dict)
    # of every loop, conditional and call as a whole, by name
    blocks: Mapping[str, float] = field(default_factory=dict)
    # start and end of every instruction on the compute stream, by name, without loops' bodies
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # by their start, without loops' bodies
    transfers: tuple[Transfer, ...] = ()
    # start and end of every wait of the compute stream: some of `spans`
    stalls: frozenset[tuple[float, float]] = frozenset()

    @property
    def actions(self) -> int:
        """Kernels that run, those of loops' bodies once, and copies."""
        return len(self.seconds) + len(self.transfers)


def replay(module: Module, device: Device, machine: Machine | None = None) -> Replay:
    """Replay the entry computation of a module on one device.

    Args:
      machine: what the device is a part of; None if the module runs on one device.
    """
    streams = _Streams(module, device, machine, {}).run(module.entry_name)
    sums = streams.sums()
    directions = ((sums[f"{stream}_s"], sums[f"{stream}_hidden_s"]) for stream in ("out", "in"))
    # Of two directions that are equally busy, report the less hidden one.
    copy_s, hidden_s = max(directions, key=lambda seconds: (round(seconds[0], 12), -seconds[1]))
    return Replay(
        flops=sums["flops"],
        compute_s=sums["compute_s"],
        copied_out_nbytes=int(sums["out_nbytes"]),
        copy_s=copy_s,
        hidden_copy_s=hidden_s,
        step_s=streams.clock.end_s,
        collective_s=sums["net_s"],
        hidden_collective_s=sums["net_hidden_s"],
        slower_s=sums["slower_s"],
        collectives=streams.collectives,
        seconds=streams.seconds,
        blocks=streams.blocks,
        spans=streams.spans,
        transfers=tuple(sorted(streams.transfers, key=lambda transfer: transfer.start_s)),
        stalls=frozenset(streams.clock.stalls),
    )


class _Streams:
    """Advances the compute stream, one copy stream in each direction and the links.

    Args:
      costs: of kernels, by name and opcode. The parts of one replay share it and fill it.
    """

    def __init__(
        self,
        module: Module,
        device: Device,
        machine: Machine | None,
        costs: dict[tuple[str, str], KernelCost],
    ) -> None:
        self._module = module
        self._device = device
        self._machine = machine
        self._costs = costs
        self.clock = Clock()  # its links are called as the streams of `Transfer`
        self._ready: dict[str, float] = {}  # name of a start that is in flight -> when it ends
        self._sums: dict[str, float] = defaultdict(float)
        self.collectives: Counter[Collective] = Counter()
        self.seconds: dict[str, float] = {}
        self.blocks: dict[str, float] = {}
        self.spans: dict[str, tuple[float, float]] = {}
        self.transfers: list[Transfer] = []

    def run(self, name: str) -> _Streams:
        body = self._module[name]
        for op in body.ops.values():
            start = self.clock.now_s
            self._step(body, op)
            self.spans[op.name] = start, self.clock.now_s
            if op.opcode in BLOCKS:
                self.blocks[op.name] = self.clock.now_s - start
        return self

    def sums(self) -> dict[str, float]:
        """Totals, the copies' seconds included."""
        sums = self._sums.copy()
        for stream, copies in self.clock.busy.items():
            for start, end in copies:
                hidden_s = self._computed_s(end) - self._computed_s(start)
                sums[f"{stream}_s"] += end - start
                sums[f"{stream}_hidden_s"] += max(0.0, hidden_s)
        return sums

    def _computed_s(self, time: float) -> float:
        """Seconds until `time` during which the compute stream was busy."""
        stalled_s = sum(min(time, end) - start for start, end in self.clock.stalls if start < time)
        return min(time, self.clock.now_s) - stalled_s

    def _step(self, body: Computation, op: Instruction) -> None:
        if is_free(op):
            return
        if op.opcode == "while":
            self._block(self._alone(op.body), op.trips)
        elif op.opcode == "conditional":
            branches = map(self._alone, op.called)
            self._block(max(branches, key=lambda branch: branch.clock.end_s), 1)
        elif op.opcode == "call":
            self.run(op.called[0])
        elif op.opcode.endswith("-start"):
            self._start(body, op)
        elif op.opcode.endswith("-done"):
            self.clock.wait(self._ready.pop(op.operands[0], 0.0))
        else:
            self._kernel(body, op)

    def _alone(self, name: str) -> _Streams:
        """A computation replayed on idle streams."""
        return _Streams(self._module, self._device, self._machine, self._costs).run(name)

    def _cost(self, body: Computation, op: Instruction) -> KernelCost:
        key = op.name, op.opcode
        if key not in self._costs:
            self._costs[key] = kernel_cost(self._module, body, op)
        return self._costs[key]

    def _block(self, part: _Streams, trips: int) -> None:
        for key, value in part.sums().items():
            self._sums[key] += trips * value
        for message, count in part.collectives.items():
            self.collectives[message] += trips * count
        self.seconds.update(part.seconds)
        self.blocks.update(part.blocks)
        self.clock.run(trips * part.clock.end_s)

    def _start(self, body: Computation, op: Instruction) -> None:
        done, _ = body.uses[op.name][0]
        wrapped = op.changed(opcode=op.opcode.removesuffix("-start"), shape=done.shape)
        if self._machine and is_collective(wrapped.opcode):
            self._ready[op.name] = self._send(self._machine, body, wrapped)
            return
        cost = self._cost(body, wrapped) if wrapped.opcode != "call" else None
        if cost and cost.is_host_copy:
            self._ready[op.name] = end = self._copy(op, cost)
            if not is_copy(self._module, op, self._device):
                self.clock.wait(end)
        else:
            self._step(body, wrapped)

    def _copy(self, op: Instruction, cost: KernelCost) -> float:
        """The end of a copy that may start now."""
        end = self.clock.now_s
        for stream, nbytes in (("out", cost.out_nbytes), ("in", cost.in_nbytes)):
            if nbytes:
                start, end = self.clock.copy(stream, copy_seconds(nbytes, self._device))
                self.transfers.append(Transfer(op.name, stream, nbytes, start, end))
                self._sums[f"{stream}_nbytes"] += nbytes
        return end

    def _send(self, machine: Machine, body: Computation, op: Instruction) -> float:
        """The end of a collective that may start now; the links serve one at a time."""
        operand_nbytes = sum(body.ops[name].nbytes for name in op.operands)
        message = collective(machine, op, operand_nbytes)
        self.collectives[message] += 1
        self.seconds[op.name] = message.seconds
        start, end = self.clock.copy("net", message.seconds)
        transfer = Transfer(op.name, "net", operand_nbytes, start, end, message.axes)
        self.transfers.append(transfer)
        return end

    def _kernel(self, body: Computation, op: Instruction) -> None:
        """Run a kernel. The compute stream waits for a collective and for access to host memory."""
        if self._machine and is_collective(op.opcode):
            self.clock.wait(self._send(self._machine, body, op))
            return
        cost = self._cost(body, op)
        if cost.is_host_copy:
            self.clock.wait(self._copy(op, cost))
            return
        slower = slower_s(op)
        seconds = self._kernel_seconds(body, op, cost) + slower
        self.clock.run(seconds)
        self.seconds[op.name] = seconds
        self._sums["flops"] += cost.flops
        self._sums["compute_s"] += seconds
        self._sums["slower_s"] += slower

    def _kernel_seconds(self, body: Computation, op: Instruction, cost: KernelCost) -> float:
        """What a kernel took when it ran on the device, or what its class achieves."""
        if self._device.kernels:
            measured_s = self._device.kernels.get(kernel_fingerprint(self._module, body, op))
            if measured_s is not None:
                return measured_s
        return class_seconds(cost, self._device)
