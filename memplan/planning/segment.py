"""What the compiler makes of a segment, and what that needs: kernels, buffers, seconds.

Views cost nothing; elementwise work melts into whoever reads it and gets a buffer only when a kernel reads it or it
outlives the segment; a reduction melts its producers into itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from memplan.planning.cost import calls_library, has_triton, kernel_seconds
from memplan.planning.devices import Device
from memplan.planning.graph import Graph, Op
from memplan.planning.plan import Action, Kind, copy_of
from memplan.planning.straight import straight_actions

_NUMBER = 16  # bytes, of the widest


@dataclass(frozen=True, slots=True)
class Segment:
    """Cost of a run of actions, relative to the live bytes before it."""

    peak_nbytes: int
    change_nbytes: int
    compute_s: float
    op: int


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Work that runs at once: values it reads and makes, scratch bytes, seconds, and the op it stands for."""

    reads: frozenset[int]
    makes: tuple[int, ...]
    scratch_nbytes: int
    seconds: float
    op: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A kernel's turn in its segment.

    Attributes:
      op: that the kernel stands for.
      seconds: that it runs.
      nbytes: device bytes while it runs, relative to the live bytes before the segment.
      extra_nbytes: of these, what no value takes: scratch memory, and what the compiler was seen to need beyond it.
      makes: values that have a buffer from now on.
      written_over: of these, the ones that take over an input's buffer when the turn ends.
      ends: values that have none after it.
    """

    op: int
    seconds: float
    nbytes: int
    extra_nbytes: int
    makes: tuple[int, ...]
    written_over: tuple[int, ...]
    ends: tuple[int, ...]


class SegmentModel:
    """Which kernels a segment becomes, which buffers they need, and when.

    A result is `fixed` where it is one of several of an instruction: XLA lets an instruction write over an operand that
    ends, but not over an element of a tuple (`HeapSimulator::RunComputation`). Calls of libraries make tuples, since
    their scratch memory is a result too, and so do copies from the host and fences. Where a segment is a program of its
    own, as on CPU, it may write over whatever it is given.
    """

    def __init__(
        self,
        graph: Graph,
        device: Device,
        slack: Mapping[int, int],
        actions: tuple[Action, ...],
        copied: frozenset[int],
    ):
        """See `Simulator.segment`."""
        self.graph = graph
        self.device = device
        self.size = graph.passing_nbytes
        self.slack = slack
        self.copied = copied
        copies = {action: copy for action in actions if (copy := copy_of(action, graph))}
        self.arriving = {value for value, direction in copies.values() if direction is Kind.PREFETCH}
        moved = {value for value, direction in copies.values() if direction is Kind.OFFLOAD}
        self.fixed = set(self.arriving)
        self.actions = [action for action in actions if action not in copies]
        self.ops = [action.target for action in self.actions if action.kind is Kind.COMPUTE]
        self.freed = {action.target for action in actions if action.kind is Kind.FREE}
        self.unneeded = self.freed - moved  # after the segment, in any memory
        self.made = {value for op in self.ops for value in self.graph.ops[op].outputs}
        self.read_by_kernel = {
            value
            for op in self.ops
            if self.graph.ops[op].fusion == "kernel"
            for value in self.graph.ops[op].inputs
            if not (self.graph.ops[op].bodies and self.is_filling(value))
        }
        self.sources: dict[int, frozenset[int]] = {}  # the buffers that a value without one is computed from
        self.melted: dict[int, float] = {}  # vector FLOPs of the work behind a value without a buffer
        self.leaving: list[int] = []  # elementwise ops whose results outlive the segment: one fusion, at its end

    def cost(self) -> Segment:
        turns, passing = self.replay()
        peak = change = self.arriving_nbytes
        at, seconds = self.ops[-1] if self.ops else -1, 0.0
        for turn in turns:
            if turn.nbytes >= peak:
                peak, at = turn.nbytes, turn.op
            change += sum(map(self.size, turn.makes)) - sum(map(self.size, turn.ends))
            seconds += turn.seconds
        return Segment(peak, change - sum(map(self.size, passing)), seconds, at)

    def replay(self) -> tuple[list[Turn], set[int]]:
        """The kernels' turns, and the values that have no buffer once the segment is over, besides those that ended."""
        kernels = [kernel for action in self.actions for kernel in self.run(action)] + self.last_fusion()
        last = {value: number for number, kernel in enumerate(kernels) for value in kernel.reads}
        turns, live = [], self.arriving_nbytes
        for number, kernel in enumerate(kernels):
            ends = [v for v in kernel.reads if last[v] == number and v in self.freed and v not in self.copied]
            unread = [value for value in kernel.makes if value in self.freed and value not in last]
            written_over = self.written_over(kernel, ends)
            extra = kernel.scratch_nbytes + self.slack.get(kernel.op, 0)
            made = sum(map(self.size, kernel.makes))
            here = live + made - sum(map(self.size, written_over)) + extra
            ended = (*ends, *unread)
            turns.append(Turn(kernel.op, kernel.seconds, here, extra, kernel.makes, written_over, ended))
            live += made - sum(map(self.size, ended))
            if (
                len(kernel.makes) > 1
                or calls_library(self.graph.ops[kernel.op], self.device)
                or self.has_siblings(kernel, kernels)
            ):
                self.fixed.update(kernel.makes)
        return turns, (self.freed - set(last) - self.made) | self.copied

    @property
    def arriving_nbytes(self) -> int:
        return sum(map(self.size, self.arriving))

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
        if not self.unneeded.issuperset(op.outputs):
            self.leaving.append(action.target)
        return []

    def melts(self, op: Op) -> bool:
        """True where a result needs no buffer yet: a view of one, or work that its readers absorb.

        Triton makes the statistics of rows in the kernel that normalizes them, if nobody else wants them.
        """
        if op.fusion == "view":
            widest = max(map(self.graph.nbytes, op.inputs), default=0)
            if all(self.graph.nbytes(value) <= widest for value in op.outputs):
                return True
        if op.fusion == "reduction":
            absorbed = op.along_rows and has_triton(self.device) and self.unneeded.issuperset(op.outputs)
        else:
            absorbed = op.fusion != "kernel"
        return absorbed and self.read_by_kernel.isdisjoint(op.outputs)

    def is_filling(self, value: int) -> bool:
        """One number over and over, which XLA fills in anew inside the bodies that read it."""
        made = self.graph.producer[value]
        op = self.graph.ops[made] if made is not None else None
        return op is not None and op.fusion == "view" and max(map(self.graph.nbytes, op.inputs), default=0) <= _NUMBER

    def last_fusion(self) -> list[_Kernel]:
        """Elementwise results that outlive the segment come out of one fusion, which reads the buffers behind them."""
        if not self.leaving:
            return []
        makes = tuple(v for op in self.leaving for v in self.graph.ops[op].outputs if v not in self.unneeded)
        reads = frozenset(source for value in makes for source in self.sources[value])
        melted = max(self.melted[value] for value in makes)
        return [self.kernel(self.leaving[-1], reads, makes, melted)]

    def kernel(self, number: int, reads: frozenset[int], makes: tuple[int, ...], melted: float) -> _Kernel:
        op, device = self.graph.ops[number], self.device
        moved = sum(map(self.graph.nbytes, reads)) + sum(map(self.graph.nbytes, makes)) + op.traffic_nbytes
        seconds = max(kernel_seconds(op.flops, op.flops_dtype, moved, device), melted / device.vector_flops)
        scratch = max((body_nbytes(body, device) for body in op.bodies), default=op.workspace_nbytes)
        return _Kernel(reads, makes, scratch, seconds, number)

    def written_over(self, kernel: _Kernel, ends: list[int]) -> tuple[int, ...]:
        """Elementwise results that take over the buffer of an input that ends here.

        An input of as many bytes, from which no other result of the same fusion is computed: XLA lets a fusion write
        over it (`FusionCanShareBufferHint` of XLA:GPU).
        """
        if self.graph.ops[kernel.op].fusion != "elementwise":
            return ()
        taken = []
        for made in kernel.makes:
            others = [value for value in kernel.makes if value != made]
            size = self.size(made)
            free = (v for v in ends if not self.is_fixed(v) and not self.is_behind(v, others))
            if size and any(self.size(value) == size for value in free):
                taken.append(made)
        return tuple(taken)

    def is_fixed(self, value: int) -> bool:
        return value in self.fixed or (self.device.target is not None and value not in self.made)

    def has_siblings(self, kernel: _Kernel, kernels: list[_Kernel]) -> bool:
        """Fusions that read the same, or one another's results, become one with several results."""
        if self.graph.ops[kernel.op].fusion == "kernel":
            return False
        touched = kernel.reads.union(kernel.makes)
        return any(
            other is not kernel and self.graph.ops[other.op].fusion != "kernel" and not touched.isdisjoint(other.reads)
            for other in kernels
        )

    def is_behind(self, value: int, made: list[int]) -> bool:
        return any(value in self.sources.get(one, ()) for one in made)


@functools.lru_cache(maxsize=256)
def body_nbytes(body: Graph, device: Device) -> int:
    """Device bytes of one trip of a loop or of a branch, besides what it is given and returns."""
    return SegmentModel(body, device, {}, straight_actions(body), frozenset()).cost().peak_nbytes
