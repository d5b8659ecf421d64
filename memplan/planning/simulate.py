"""Replay a plan: live device bytes, live host bytes, and three streams (compute, copies out, copies in) over time.

Every fence holds. What a segment needs in itself is the matter of `memplan.planning.segment`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memplan.planning.cost import copy_seconds
from memplan.planning.devices import Device
from memplan.planning.graph import Graph
from memplan.planning.plan import Action, Kind, Plan, copy_of
from memplan.planning.segment import Segment, SegmentModel


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
      begin_s: when it computes, having waited for copies to the device.
    """

    device_nbytes: int
    after_nbytes: int
    host_nbytes: int
    start_s: float
    end_s: float
    stall_s: float
    op: int
    begin_s: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A segment in its plan.

    Attributes:
      actions: of the segment.
      moves: values that it copies on the device, and in which direction.
      made: values that it computes.
      copied: values whose copies to the host end with it, and so do the values on the device.
    """

    actions: tuple[Action, ...]
    moves: tuple[tuple[int, Kind], ...]
    made: frozenset[int]
    copied: frozenset[int]


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

    def run(self, plan: Plan) -> Timeline:
        live, host, now = base_nbytes(self.graph), 0, 0.0
        out_free = in_free = 0.0
        arrives: dict[int, float] = {}
        leaves: dict[int, float] = {}
        moments: list[Moment] = []
        copies: list[Copy] = []
        to_come: set[int] = set()  # values copied to the host that take no host memory yet
        for stretch in stretches(plan, self.graph):
            actions, moves, made = stretch.actions, stretch.moves, stretch.made
            cost = self.segment(actions, stretch.copied)
            start = now
            for value, direction in moves:  # copies that this segment starts or needs
                if direction is Kind.PREFETCH:
                    begin = max(start, in_free, leaves.get(value, 0.0))
                    in_free = begin + copy_seconds(self.graph.nbytes(value), self.device)
                    arrives[value] = in_free
                    copies.append(Copy(value, Kind.PREFETCH, begin, in_free))
            needed = [arrives.pop(value) for value in _read(actions, self.graph, arrives)]
            computes = max([start, *needed])
            end = computes + cost.compute_s
            for value, direction in moves:
                if direction is Kind.OFFLOAD:
                    begin = max(end if value in made else start, out_free)
                    out_free = begin + copy_seconds(self.graph.nbytes(value), self.device)
                    leaves[value] = out_free
                    copies.append(Copy(value, Kind.OFFLOAD, begin, out_free))
            host_peak = host
            for value, comes in host_changes(actions, to_come):
                host += self.graph.nbytes(value) if comes else -self.graph.nbytes(value)
                host_peak = max(host_peak, host)
            waited = [leaves[a.target] for a in actions if a.kind is Kind.FREE and a.target in leaves]
            finish = max([end, *waited])
            peak = live + cost.peak_nbytes
            live += cost.change_nbytes
            stall = finish - start - cost.compute_s
            moments.append(Moment(peak, live, host_peak, start, finish, stall, cost.op, computes))
            now = finish
        return Timeline(tuple(moments), tuple(copies))

    def segment(self, actions: tuple[Action, ...], copied: frozenset[int]) -> Segment:
        """Cost of a segment.

        Args:
          actions, copied: see `Stretch`.
        """
        key = actions, copied
        known = self._known.get(key)
        if known is None:
            model = SegmentModel(self.graph, self.device, self.slack, actions, copied)
            known = self._known[key] = model.cost()
        return known


def base_nbytes(graph: Graph) -> int:
    """Bytes that are there from beginning to end: inputs, and outputs with a buffer of their own."""
    own = graph.returned.difference(graph.reused, graph.inputs)
    return graph.resident_nbytes + sum(map(graph.nbytes, own))


def stretches(plan: Plan, graph: Graph) -> Iterator[Stretch]:
    """The segments of a plan; a step without operations is one empty segment."""
    copying: frozenset[int] = frozenset()  # copies to the host that nothing has waited for yet
    for actions in tuple(plan.segments()) or ((),):
        freed = {action.target for action in actions if action.kind is Kind.FREE}
        moves = tuple(copy for action in actions if (copy := copy_of(action, graph)))
        leaving = {value for value, direction in moves if direction is Kind.OFFLOAD}
        made = frozenset(v for a in actions if a.kind is Kind.COMPUTE for v in graph.ops[a.target].outputs)
        yield Stretch(actions, moves, made, frozenset((copying | (leaving - made)) & freed))
        copying = (copying | leaving) - freed


def host_changes(actions: tuple[Action, ...], to_come: set[int]) -> Iterator[tuple[int, bool]]:
    """Values that take host memory (True) or give it back (False) in a segment, in order.

    Args:
      to_come: values copied to the host that take no host memory yet; updated.
    """
    for action in actions:
        if action.kind is Kind.OFFLOAD:
            to_come.add(action.target)
        elif action.target in to_come and action.kind is not Kind.COMPUTE:
            to_come.discard(action.target)
            yield action.target, True
        if action.kind is Kind.RELEASE:
            yield action.target, False


def _read(actions: tuple[Action, ...], graph: Graph, among: Mapping[int, float]) -> set[int]:
    """Values of `among` that the computations read."""
    return {
        value
        for action in actions
        if action.kind is Kind.COMPUTE
        for value in graph.ops[action.target].inputs
        if value in among
    }
