"""Copies that stream: each is given the time of the segments beside it instead of a segment's own.

What comes from the host is asked for as many segments early as its copy and those behind it last; what goes there
leaves as soon as the link is free, and its bytes on the device last until it is gone. Where the bytes allow less, the
copy gets less, and the step waits for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

from memplan.planning.cost import copy_seconds
from memplan.planning.devices import Device
from memplan.planning.graph import Graph
from memplan.planning.plan import FENCE, Action, Kind, Plan, copy_of
from memplan.planning.simulate import Timeline


def streamed(plan: Plan, graph: Graph, device: Device, timeline: Timeline, budget_bytes: int) -> Plan:
    """The plan with its copies spread over the segments beside them.

    Args:
      plan: any; its order of computations stays.
      graph: of the plan.
      device: whose link the copies take.
      timeline: of the plan.
      budget_bytes: device bytes that no segment may exceed for it.
    """
    streams = _Streams(plan, graph, device, timeline, budget_bytes)
    streams.ask_early()
    streams.leave_late()
    joined = chain.from_iterable([*segment, FENCE] for segment in streams.segments)
    return replace(plan, actions=tuple(joined)[:-1])


class _Streams:
    """Segments as lists that copies move between.

    Attributes:
      room: bytes of the budget that each segment leaves.
      starts: seconds at which each segment starts if it never waits, and the end of the last.
    """

    def __init__(self, plan: Plan, graph: Graph, device: Device, timeline: Timeline, budget_bytes: int):
        self.graph = graph
        self.device = device
        self.segments = [list(segment) for segment in plan.segments()]
        self.room = [budget_bytes - moment.device_nbytes for moment in timeline.moments]
        computing = (moment.end_s - moment.start_s - moment.stall_s for moment in timeline.moments)
        self.starts = list(accumulate(computing, initial=0.0))

    def ask_early(self) -> None:
        """Copies to the device, the last one first: each is done when it is read, or when the next one begins."""
        free_s = self.starts[-1]
        for number, action, value in reversed(self.copies(Kind.PREFETCH)):
            free_s = min(self.starts[number], free_s) - self.seconds(value)
            first = number
            while self.starts[first] > free_s and self.is_behind(first, action) and self.may_be_in(first - 1, value):
                first -= 1
            free_s = max(free_s, self.starts[first])
            if first < number:
                self.segments[number].remove(action)
                self.segments[first].insert(0, action)
                self.take(range(first, number), value)

    def leave_late(self) -> None:
        """Copies to the host, the first one first: each begins where it is made, or when the one before ends."""
        free_s = 0.0
        for number, action, value in self.copies(Kind.OFFLOAD):
            free_s = max(self.starts[number + 1], free_s) + self.seconds(value)
            ending = Action(Kind.FREE, value)
            last = number
            while self.starts[last + 1] < free_s and self.may_be_in(last + 1, value):
                last += 1
            if last > number and ending in self.segments[number]:
                self.segments[number].remove(action)
                self.segments[number].remove(ending)
                self.segments[number + 1].insert(0, action)
                self.segments[last].append(ending)
                self.take(range(number + 1, last + 1), value)

    def copies(self, direction: Kind) -> list[tuple[int, Action, int]]:
        """Segment, action and value of all copies in a direction, in order."""
        found = ((n, action, copy_of(action, self.graph)) for n, seg in enumerate(self.segments) for action in seg)
        return [(number, action, copy[0]) for number, action, copy in found if copy and copy[1] is direction]

    def may_be_in(self, number: int, value: int) -> bool:
        """Is there room for it, and is it neither there anyway nor still on its way to the host?"""
        roomy = 0 <= number < len(self.segments) and self.graph.nbytes(value) <= self.room[number]
        return roomy and not any(self.touches(action, value) for action in self.segments[number])

    def is_behind(self, number: int, copy: Action) -> bool:
        """Is what the program's own copy reads made before this segment?"""
        read = self.graph.ops[copy.target].inputs if copy.kind is Kind.COMPUTE else ()
        ops = (action.target for action in self.segments[number] if action.kind is Kind.COMPUTE)
        return not any(value in self.graph.ops[op].outputs for op in ops for value in read)

    def take(self, numbers: Sequence[int], value: int) -> None:
        for number in numbers:
            self.room[number] -= self.graph.nbytes(value)

    def seconds(self, value: int) -> float:
        return copy_seconds(self.graph.nbytes(value), self.device)

    def touches(self, action: Action, value: int) -> bool:
        if action.kind is Kind.COMPUTE:
            op = self.graph.ops[action.target]
            return value in (*op.inputs, *op.outputs)
        return action.target == value and action.kind in (Kind.FREE, Kind.PREFETCH)
