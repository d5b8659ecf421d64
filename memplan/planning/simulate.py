"""Replay a plan: live device bytes, live host bytes, and three streams (compute, copies out, copies in) over time.

The model of the compiler, per segment: views cost nothing; elementwise work melts into whoever reads it and gets a
buffer only when a kernel reads it or it outlives the segment; a reduction melts its producers into itself. Every fence
holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memplan.planning.cost import copy_seconds, kernel_seconds
from memplan.planning.devices import Device
from memplan.planning.graph import Graph, Op
from memplan.planning.plan import Action, Kind, Plan


@dataclass(frozen=True, slots=True)
class Moment:
    """What one segment does.

    Attributes:
      device_nbytes: largest device bytes inside it, arguments and outputs included.
      after_nbytes: device bytes when it has ended.
      host_nbytes: largest host bytes inside it. XLA starts a copy to the host next to where the copy on the device
        ends, whatever a plan says, and takes host memory from there on.
      start_s, end_s: on the compute stream.
      stall_s: seconds it waits for copies.
      op: the operation at its peak, -1 if it computes nothing.
    """

    device_nbytes: int
    after_nbytes: int
    host_nbytes: int
    start_s: float
    end_s: float
    stall_s: float
    op: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer of `value` on one of the copy streams."""

    value: int
    direction: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A plan replayed. `moments` has one entry per segment."""

    moments: tuple[Moment, ...]
    copies: tuple[Copy, ...]

    @property
    def peak_nbytes(self) -> int:
        return max((moment.device_nbytes for moment in self.moments), default=0)

    @property
    def host_peak_nbytes(self) -> int:
        return max((moment.host_nbytes for moment in self.moments), default=0)

    @property
    def step_s(self) -> float:
        ends = [moment.end_s for moment in self.moments[-1:]] + [copy.end_s for copy in self.copies]
        return max(ends, default=0.0)

    @property
    def compute_s(self) -> float:
        """Seconds of computation, stalls left out."""
        return sum(moment.end_s - moment.start_s - moment.stall_s for moment in self.moments)

    @property
    def peak_op(self) -> int:
        """Operation that runs at the device peak."""
        return max(self.moments, key=lambda moment: moment.device_nbytes).op if self.moments else -1


@dataclass(frozen=True, slots=True)
class Segment:
    """Cost of a run of actions, relative to the live bytes before it."""

    peak_nbytes: int
    change_nbytes: int
    compute_s: float
    op: int


@dataclass
class Simulator:
    """Replays plans of one graph on one device; segments seen before are not computed again.

    Attributes:
      slack: bytes that the compiler was seen to need beyond the model, by operation at the segment's peak.
    """

    graph: Graph
    device: Device
    slack: Mapping[int, int] = field(default_factory=dict)
    _known: dict[tuple[tuple[Action, ...], frozenset[int]], Segment] = field(default_factory=dict)

    @property
    def base_nbytes(self) -> int:
        """Bytes that are there from beginning to end: inputs, and outputs with a buffer of their own."""
        graph = self.graph
        own = graph.returned.difference(graph.reused, graph.inputs)
        return graph.resident_nbytes + sum(map(graph.nbytes, own))

    def run(self, plan: Plan) -> Timeline:
        live, host, now = self.base_nbytes, 0, 0.0
        out_free = in_free = 0.0
        arrives: dict[int, float] = {}
        leaves: dict[int, float] = {}
        moments: list[Moment] = []
        copies: list[Copy] = []
        copying: set[int] = set()  # copies to the host that nothing has waited for yet
        to_come: set[int] = set()  # values copied to the host that take no host memory yet
        for actions in tuple(plan.segments()) or ((),):  # a step without operations is one empty segment
            freed = {action.target for action in actions if action.kind is Kind.FREE}
            cost = self.segment(actions, frozenset(copying & freed))
            copying = (copying - freed) | {
                a.target for a in actions if a.kind is Kind.OFFLOAD and a.target not in freed
            }
            start = now
            for action in actions:  # copies that this segment starts or needs
                value = action.target
                if action.kind is Kind.PREFETCH:
                    begin = max(start, in_free, leaves.get(value, 0.0))
                    in_free = begin + copy_seconds(self.graph.nbytes(value), self.device)
                    arrives[value] = in_free
                    copies.append(Copy(value, Kind.PREFETCH, begin, in_free))
            needed = [arrives.pop(value) for value in _read(actions, self.graph, arrives)]
            begin = max([start, *needed])
            end = begin + cost.compute_s
            host_peak = host
            for action in actions:
                value = action.target
                if action.kind is Kind.OFFLOAD:
                    leaving = max(end if self._made_here(value, actions) else start, out_free)
                    out_free = leaving + copy_seconds(self.graph.nbytes(value), self.device)
                    leaves[value] = out_free
                    copies.append(Copy(value, Kind.OFFLOAD, leaving, out_free))
                    to_come.add(value)
                elif value in to_come and action.kind is not Kind.COMPUTE:
                    to_come.discard(value)
                    host += self.graph.nbytes(value)
                    host_peak = max(host_peak, host)
                if action.kind is Kind.RELEASE:
                    host -= self.graph.nbytes(value)
            waited = [leaves[a.target] for a in actions if a.kind is Kind.FREE and a.target in leaves]
            finish = max([end, *waited])
            peak = live + cost.peak_nbytes
            live += cost.change_nbytes
            moments.append(Moment(peak, live, host_peak, start, finish, finish - start - cost.compute_s, cost.op))
            now = finish
        return Timeline(tuple(moments), tuple(copies))

    def segment(self, actions: tuple[Action, ...], copied: frozenset[int] = frozenset()) -> Segment:
        """Cost of a segment; the copies of `copied` to the host end with it, and so do the values on the device."""
        known = self._known.get((actions, copied))
        if known is None:
            known = self._known[actions, copied] = _SegmentModel(self, actions, copied).cost()
        return known

    def size(self, value: int) -> int:
        """Device bytes of a value while it lives; inputs and outputs are counted from the beginning."""
        known = self.graph.values[value]
        return 0 if known.role != "intermediate" or value in self.graph.returned else known.nbytes

    def _made_here(self, value: int, actions: tuple[Action, ...]) -> bool:
        made = self.graph.producer[value]
        return any(action.kind is Kind.COMPUTE and action.target == made for action in actions)


def _read(actions: tuple[Action, ...], graph: Graph, among: Mapping[int, float]) -> set[int]:
    """Values of `among` that the computations read."""
    return {
        value
        for action in actions
        if action.kind is Kind.COMPUTE
        for value in graph.ops[action.target].inputs
        if value in among
    }


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Work that runs at once: values it reads and makes, scratch bytes, seconds, and the op it stands for."""

    reads: frozenset[int]
    makes: tuple[int, ...]
    scratch_nbytes: int
    seconds: float
    op: int


class _SegmentModel:
    """Which kernels a segment becomes, which buffers they need, and when."""

    def __init__(self, simulator: Simulator, actions: tuple[Action, ...], copied: frozenset[int]):
        self.simulator = simulator
        self.copied = copied
        self.graph = simulator.graph
        self.actions = actions
        self.ops = [action.target for action in actions if action.kind is Kind.COMPUTE]
        self.freed = {action.target for action in actions if action.kind is Kind.FREE}
        self.made = {value for op in self.ops for value in self.graph.ops[op].outputs}
        self.read_by_kernel = {
            value for op in self.ops if self.graph.ops[op].fusion == "kernel" for value in self.graph.ops[op].inputs
        }
        self.sources: dict[int, frozenset[int]] = {}  # the buffers that a value without one is computed from
        self.melted: dict[int, float] = {}  # vector FLOPs of the work behind a value without a buffer
        self.leaving: list[int] = []  # elementwise ops whose results outlive the segment: one fusion, at its end

    def cost(self) -> Segment:
        kernels = [kernel for action in self.actions for kernel in self.run(action)] + self.last_fusion()
        last = {value: number for number, kernel in enumerate(kernels) for value in kernel.reads}
        arriving = sum(self.simulator.size(a.target) for a in self.actions if a.kind is Kind.PREFETCH)
        live = peak = arriving
        at = self.ops[-1] if self.ops else -1
        for number, kernel in enumerate(kernels):
            made = sum(map(self.simulator.size, kernel.makes))
            ends = [v for v in kernel.reads if last[v] == number and v in self.freed and v not in self.copied]
            unread = [value for value in kernel.makes if value in self.freed and value not in last]
            here = live + made - self.in_place(kernel, ends) + kernel.scratch_nbytes
            here += self.simulator.slack.get(kernel.op, 0)
            if here >= peak:
                peak, at = here, kernel.op
            live += made - sum(map(self.simulator.size, [*ends, *unread]))
        passing = (self.freed - set(last) - self.made) | self.copied
        live -= sum(map(self.simulator.size, passing))
        return Segment(peak, live, sum(kernel.seconds for kernel in kernels), at)

    def run(self, action: Action) -> list[_Kernel]:
        """The kernel that an action becomes, if it does not melt into others."""
        if action.kind is not Kind.COMPUTE:
            return []
        op = self.graph.ops[action.target]
        reads = frozenset(source for value in op.inputs for source in self.sources.get(value, (value,)))
        melted = sum(self.melted.get(value, 0.0) for value in dict.fromkeys(op.inputs))
        if not self.melts(op):
            return [self.kernel(action.target, reads, op.outputs, melted)]
        self.sources.update(dict.fromkeys(op.outputs, reads))
        self.melted.update(dict.fromkeys(op.outputs, melted + op.flops))
        if any(value not in self.freed for value in op.outputs):
            self.leaving.append(action.target)
        return []

    def melts(self, op: Op) -> bool:
        """True where a result needs no buffer yet: a view of one, or work that its readers absorb."""
        if op.fusion == "view":
            widest = max(map(self.graph.nbytes, op.inputs), default=0)
            if all(self.graph.nbytes(value) <= widest for value in op.outputs):
                return True
        return op.fusion in ("view", "elementwise") and self.read_by_kernel.isdisjoint(op.outputs)

    def last_fusion(self) -> list[_Kernel]:
        """Elementwise results that outlive the segment come out of one fusion, which reads the buffers behind them."""
        if not self.leaving:
            return []
        makes = tuple(v for op in self.leaving for v in self.graph.ops[op].outputs if v not in self.freed)
        reads = frozenset(source for value in makes for source in self.sources[value])
        melted = max(self.melted[value] for value in makes)
        return [self.kernel(self.leaving[-1], reads, makes, melted)]

    def kernel(self, number: int, reads: frozenset[int], makes: tuple[int, ...], melted: float) -> _Kernel:
        op, device = self.graph.ops[number], self.simulator.device
        moved = sum(map(self.graph.nbytes, reads)) + sum(map(self.graph.nbytes, makes)) + op.traffic_nbytes
        seconds = max(kernel_seconds(op.flops, op.flops_dtype, moved, device), melted / device.vector_flops)
        return _Kernel(reads, makes, op.workspace_nbytes, seconds, number)

    def in_place(self, kernel: _Kernel, ends: list[int]) -> int:
        """Bytes of elementwise results that take over the buffer of an input that ends here.

        An input of as many bytes, from which no other result of the same fusion is computed: XLA lets a fusion write
        over it (`FusionCanShareBufferHint` of XLA:GPU).
        """
        if self.graph.ops[kernel.op].fusion != "elementwise":
            return 0
        taken = 0
        for made in kernel.makes:
            others = [value for value in kernel.makes if value != made]
            size = self.simulator.size(made)
            if size and any(self.simulator.size(v) == size and not self.is_behind(v, others) for v in ends):
                taken += size
        return taken

    def is_behind(self, value: int, made: list[int]) -> bool:
        return any(value in self.sources.get(one, ()) for one in made)
