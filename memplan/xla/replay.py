"""Scheduled optimized HLO -> bytes moved and seconds of one step: a roofline per kernel, three streams.

The same account for every executable, whoever decided what it recomputes and offloads.

Left out: caches, elementwise arithmetic, the conditions of loops; and unless `Overheads` are given, launches, slow
devices and what messages take of device memory's bandwidth. A loop is one block: its body is replayed with idle streams
and taken times its trip count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from memplan.hardware.device import Device
from memplan.hardware.overheads import NONE, Overheads
from memplan.hardware.roofline import copy_seconds, kernel_seconds
from memplan.hardware.topology import Topology
from memplan.xla.collective_cost import COLLECTIVES, Collective, Network
from memplan.xla.kernel_cost import Moved, bytes_moved, matrix_work
from memplan.xla.module import BLOCKS, Computation, Instruction, Module, read_module

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "add-dependency",
         "partition-id", "replica-id"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between device and host memory, or a message to other devices.

    Attributes:
      name: of the instruction that starts it.
      way: "out" to the host, "in" from it, "net" to other devices.
      nbytes: bytes.
      start_s, end_s: on the stream of its way.
    """

    name: str
    way: str
    nbytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Traffic:
    """What one step moves and how long that takes at the device's peak rates.

    Attributes:
      kernel_nbytes: bytes of device memory that kernels read and write.
      flops: of matrix products and convolutions.
      kernels: how many run.
      convolutions: how many of them are convolutions or matrix products.
      compute_s: sum of the kernels' roofline seconds.
      copied_out_nbytes, copied_in_nbytes: bytes to the host and from it.
      copy_s: seconds that the busier direction of the link is busy.
      hidden_copy_s: of these, seconds during which kernels run.
      step_s: seconds from the first kernel to the end of everything.
      collective_s, hidden_collective_s: seconds that the links between devices are busy; of these, while kernels run.
      collectives: how often each collective runs.
      seconds: of every kernel by name, those in loops' bodies included, where one trip counts.
      blocks: likewise of every loop, conditional and call, as a whole.
      clock: of every instruction by name, when it starts and ends on the compute stream; loops' bodies not included.
      transfers: by the time they start; loops' bodies not included.
      stalls: when the compute stream waits; entries of `clock`.
    """

    kernel_nbytes: int
    flops: float
    kernels: int
    convolutions: int
    compute_s: float
    copied_out_nbytes: int
    copied_in_nbytes: int
    copy_s: float
    hidden_copy_s: float
    step_s: float
    collective_s: float = 0.0
    hidden_collective_s: float = 0.0
    collectives: Mapping[Collective, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, float] = field(default_factory=dict)
    clock: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    stalls: frozenset[tuple[float, float]] = frozenset()


def traffic(module: Module | str, device: Device, topology: Topology | None = None) -> Traffic:
    """Replay the entry computation of a module, or of its text, on `device`, one of those of `topology`.

    Raises:
      UnreadableModuleError: the text is not a scheduled module.
    """
    kernels = _Kernels(_read(module), device)
    return _replayed(_Replay(kernels, Network(topology, topology) if topology else None))


def replays(
    module: Module | str, device: Device, compiled_for: Topology, links: Iterable[Topology], overheads: Overheads
) -> Iterator[Traffic]:
    """The same for a program that was compiled for other sizes of the axes, on each of `links`, with overheads."""
    kernels = _Kernels(_read(module), device)
    for topology in links:
        network = Network(compiled_for, topology, overheads.collective_launch_s)
        yield _replayed(_Replay(kernels, network, overheads))


def _read(module: Module | str) -> Module:
    return read_module(module) if isinstance(module, str) else module


def _replayed(idle: _Replay) -> Traffic:
    replay = idle.run_entry()
    sums = replay.sums()
    ways = ((sums[f"{way}_s"], sums[f"{way}_hidden_s"]) for way in ("out", "in"))
    copy_s, hidden_s = max(ways, key=lambda way: (round(way[0], 12), -way[1]))  # as busy: the less hidden one
    return Traffic(
        kernel_nbytes=int(sums["nbytes"]),
        flops=sums["flops"],
        kernels=int(sums["kernels"]),
        convolutions=int(sums["convolutions"]),
        compute_s=sums["compute_s"],
        copied_out_nbytes=int(sums["out_nbytes"]),
        copied_in_nbytes=int(sums["in_nbytes"]),
        copy_s=copy_s,
        hidden_copy_s=hidden_s,
        step_s=replay.end_s,
        collective_s=sums["net_s"],
        hidden_collective_s=sums["net_hidden_s"],
        collectives=replay.collectives,
        seconds=replay.seconds,
        blocks=replay.blocks,
        clock=replay.clock,
        transfers=tuple(sorted(replay.transfers, key=lambda one: one.start_s)),
        stalls=frozenset(replay.stalls),
    )


class _Kernels:
    """What the instructions of a module move and compute: worked out once, for all replays."""

    def __init__(self, module: Module, device: Device) -> None:
        self.module, self.device = module, device
        self._moved: dict[tuple[str, str], Moved] = {}
        self._work: dict[str, tuple[float, str]] = {}

    def moved(self, body: Computation, op: Instruction) -> Moved:
        key = op.name, op.opcode
        if key not in self._moved:
            self._moved[key] = bytes_moved(self.module, body, op)
        return self._moved[key]

    def work(self, body: Computation, op: Instruction) -> tuple[float, str]:
        if op.name not in self._work:
            self._work[op.name] = matrix_work(self.module, body, op)
        return self._work[op.name]


class _Replay:
    """The compute stream, one copy stream in each direction and the links, advanced instruction by instruction.

    With overheads it is the slowest device's: the others wait for it.
    """

    def __init__(self, kernels: _Kernels, network: Network | None, overheads: Overheads = NONE) -> None:
        self._kernels, self._network, self._overheads = kernels, network, overheads
        self._module, self._device = kernels.module, kernels.device
        self._slowest = overheads.slowest(network.links.devices) if network else 1.0
        self._clock = 0.0  # compute stream, seconds
        self._input_s = network.input_seconds(overheads.input_bytes) if network else 0.0
        self._shares: deque[tuple[float, float, float]] = deque()  # of memory's bandwidth: from, until, how much
        self.stalls: list[tuple[float, float]] = []  # of the compute stream
        self._copies: dict[str, list[tuple[float, float]]] = {"out": [], "in": [], "net": []}
        self._ready: dict[str, float] = {}  # copies under way -> when they end
        self._sums: dict[str, float] = defaultdict(float)
        self.collectives: Counter[Collective] = Counter()
        self.seconds: dict[str, float] = {}
        self.blocks: dict[str, float] = {}
        self.clock: dict[str, tuple[float, float]] = {}
        self.transfers: list[Transfer] = []

    def run_entry(self) -> _Replay:
        return self.run(self._module.entry_name)

    def run(self, name: str) -> _Replay:
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
        return max(self._clock, self._input_s, *(copies[-1][1] for copies in self._copies.values() if copies))

    def sums(self) -> dict[str, float]:
        """Totals, the copies' seconds included."""
        sums = self._sums.copy()
        for way, copies in self._copies.items():
            for start, end in copies:
                sums[f"{way}_s"] += end - start
                sums[f"{way}_hidden_s"] += max(0.0, self._computed_s(end) - self._computed_s(start))
        return sums

    def _computed_s(self, time: float) -> float:
        """Seconds until `time` during which the compute stream was busy."""
        return min(time, self._clock) - sum(min(time, end) - start for start, end in self.stalls if start < time)

    def _step(self, body: Computation, op: Instruction) -> None:
        if op.opcode in _FREE or '"AllocateBuffer"' in op.attributes:
            return
        if op.opcode == "while":
            trips = _TRIPS.search(op.attributes)
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

    def _alone(self, name: str) -> _Replay:
        once_in_a_step = replace(self._overheads, input_bytes=0)
        return _Replay(self._kernels, self._network, once_in_a_step).run(name)

    def _block(self, part: _Replay, times: int) -> None:
        for key, value in part.sums().items():
            self._sums[key] += times * value
        for collective, count in part.collectives.items():
            self.collectives[collective] += times * count
        self.seconds.update(part.seconds)
        self.blocks.update(part.blocks)
        self._compute(times * part.end_s)

    def _start(self, body: Computation, op: Instruction) -> None:
        done, _ = body.uses[op.name][0]
        wrapped = replace(op, opcode=op.opcode.removesuffix("-start"), shape=done.shape)
        if self._network and wrapped.opcode.startswith(COLLECTIVES):
            self._ready[op.name] = self._send(self._network, body, wrapped)
            return
        moved = self._kernels.moved(body, wrapped) if wrapped.opcode != "call" else None
        if moved and moved.between_memories:
            self._ready[op.name] = self._copy(op, moved)
        else:
            self._step(body, wrapped)

    def _copy(self, op: Instruction, moved: Moved) -> float:
        """When a copy ends that may start now."""
        end = self._clock
        for way, nbytes in (("out", moved.out_nbytes), ("in", moved.in_nbytes)):
            if nbytes:
                start = max(self._clock, self._free(way))
                end = start + copy_seconds(nbytes, self._device)
                self._copies[way].append((start, end))
                self.transfers.append(Transfer(op.name, way, nbytes, start, end))
                self._sums[f"{way}_nbytes"] += nbytes
        return end

    def _send(self, network: Network, body: Computation, op: Instruction) -> float:
        """When a collective ends that may start now; the links serve one at a time."""
        operands = sum(body.ops[name].nbytes for name in op.operands)
        collective = network.collective(op.opcode, op.attributes, operands, op.nbytes)
        self.collectives[collective] += 1
        start, seconds = max(self._clock, self._free("net")), network.seconds(collective)
        self.seconds[op.name] = seconds
        self._copies["net"].append((start, start + seconds))
        self.transfers.append(Transfer(op.name, "net", operands, start, start + seconds))
        sent_bytes = network.sent_bytes(collective)
        share = self._overheads.memory_share(sent_bytes, seconds, self._device.memory_bandwidth)
        if share:
            self._shares.append((start, start + seconds, share))
        return start + seconds

    def _free(self, way: str) -> float:
        """When the links of a stream are free; each direction of the host's goes beside the other."""
        ways = {way}
        if self._overheads.copies_share_links:
            ways |= set(self._copies) if way == "net" else {"net"}
        free = max((self._copies[one][-1][1] for one in ways if self._copies[one]), default=0.0)
        return max(free, self._input_s) if "net" in ways else free

    def _compute(self, seconds: float) -> None:
        """Advance the compute stream by so many seconds of work, which messages beside it slow down."""
        while self._shares and self._shares[0][1] <= self._clock:
            self._shares.popleft()
        for start, end, share in self._shares:
            before = max(0.0, start - self._clock)
            if seconds <= before:
                break
            seconds -= before
            self._clock = max(self._clock, start)
            beside = (end - self._clock) * (1 - share)
            if seconds <= beside:
                self._clock += seconds / (1 - share)
                return
            seconds, self._clock = seconds - beside, end
        self._clock += seconds

    def _wait(self, until: float) -> None:
        if until > self._clock:
            self.stalls.append((self._clock, until))
            self._clock = until

    def _kernel(self, body: Computation, op: Instruction) -> None:
        if self._network and op.opcode.startswith(COLLECTIVES):
            self._wait(self._send(self._network, body, op))
            return
        self._run(body, op)

    def _run(self, body: Computation, op: Instruction) -> None:
        """What touches host memory is a copy that everything waits for."""
        moved = self._kernels.moved(body, op)
        if moved.between_memories:
            self._wait(self._copy(op, moved))
            return
        flops, dtype = self._kernels.work(body, op)
        roofline_s = kernel_seconds(flops, dtype, moved.device_nbytes, self._device)
        seconds = self._slowest * self._overheads.kernel_s(roofline_s)
        start = self._clock
        self._compute(seconds)
        self.seconds[op.name] = seconds
        self._sums["nbytes"] += moved.device_nbytes
        self._sums["flops"] += flops
        self._sums["kernels"] += 1
        self._sums["convolutions"] += flops > 0
        self._sums["compute_s"] += self._clock - start
