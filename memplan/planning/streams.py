"""State that streams: copies beside a neighbouring segment instead of between two.

What comes from the host is asked for a segment before it is read, what goes there leaves a segment after it was made,
where the bytes allow it. The fence between them then waits for no copy that has not had a segment's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from memplan.planning.graph import Graph
from memplan.planning.plan import FENCE, Action, Kind, Plan
from memplan.planning.simulate import Moment


def spread(plan: Plan, graph: Graph, moments: Sequence[Moment], budget_bytes: int) -> Plan:
    """The plan with its copies of state a segment apart from what they serve; `moments` as it is simulated."""
    segments = [list(segment) for segment in plan.segments()]
    room = [budget_bytes - moment.device_nbytes for moment in moments]
    for number in range(1, len(segments)):
        for action in [one for one in segments[number] if _is_fetch(one, graph)]:
            nbytes = graph.nbytes(_made(action, graph))
            if nbytes <= room[number - 1] and not _touches(segments[number - 1], _made(action, graph), graph):
                segments[number].remove(action)
                segments[number - 1].insert(0, action)
                room[number - 1] -= nbytes
    for number in reversed(range(len(segments) - 1)):
        for action in [one for one in segments[number] if _is_put(one, graph)]:
            (value,) = graph.ops[action.target].inputs
            ending = Action(Kind.FREE, value)
            if graph.nbytes(value) <= room[number + 1] and ending in segments[number]:
                segments[number].remove(action)
                segments[number].remove(ending)
                segments[number + 1][:0] = [action, ending]
                room[number + 1] -= graph.nbytes(value)
    joined = chain.from_iterable([*segment, FENCE] for segment in segments)
    return replace(plan, actions=tuple(joined)[:-1])


def _is_fetch(action: Action, graph: Graph) -> bool:
    return _is_copy(action, graph) and graph.nbytes(_made(action, graph)) > 0


def _is_put(action: Action, graph: Graph) -> bool:
    return _is_copy(action, graph) and not graph.nbytes(_made(action, graph))


def _is_copy(action: Action, graph: Graph) -> bool:
    return action.kind is Kind.COMPUTE and graph.ops[action.target].crosses_memories


def _made(action: Action, graph: Graph) -> int:
    return graph.ops[action.target].outputs[0]


def _touches(segment: Sequence[Action], value: int, graph: Graph) -> bool:
    """Is the value there already, at least in part of the segment?"""
    return any(
        action == Action(Kind.FREE, value)
        or (
            action.kind is Kind.COMPUTE
            and value in (*graph.ops[action.target].inputs, *graph.ops[action.target].outputs)
        )
        for action in segment
    )
