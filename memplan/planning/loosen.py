"""A plan with fewer fences.

A fence keeps what runs again from running early. Where nothing has run twice so far, and where memory is far from the
budget, it only keeps the compiler from fusing across it. Without a fence between them, two runs of an operation are one
to the compiler, and so they are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from memplan.planning.graph import Graph
from memplan.planning.layout import Layout
from memplan.planning.plan import FENCE, Action, Kind, Plan
from memplan.planning.simulate import Timeline


def loosened(plan: Plan, timeline: Timeline, layout: Layout, below_bytes: float) -> Plan:
    """The plan without fences before its first recomputation, and between segments that both need less than this.

    Transparent ops do not count. Plans that move values keep all their fences: copies are placed by them.
    """
    if any(action.kind in (Kind.OFFLOAD, Kind.PREFETCH) for action in plan.actions):
        return plan
    actions: list[Action] = []
    begun: set[int] = set()
    first = True  # no operation has run twice
    low = False
    for segment, moment in zip(plan.segments(), timeline.moments, strict=True):
        ops = [a.target for a in segment if a.kind is Kind.COMPUTE and a.target not in layout.transparent]
        first = first and begun.isdisjoint(ops)
        begun.update(ops)
        was_low, low = low, moment.device_nbytes < below_bytes
        if actions and not first and not (was_low and low):
            actions.append(FENCE)
        actions.extend(segment)
    joined = replace(plan, actions=tuple(actions))
    return replace(joined, actions=tuple(_without_repetitions(joined.segments(), layout.graph)))


def _without_repetitions(segments: Iterable[Sequence[Action]], graph: Graph) -> Iterator[Action]:
    """What runs again in its own segment runs once, and what it makes stays until then."""
    for number, segment in enumerate(segments):
        if number:
            yield FENCE
        last = {action: place for place, action in enumerate(segment)}
        begun: set[int] = set()
        for place, action in enumerate(segment):
            if action.kind is Kind.COMPUTE:
                if action.target in begun:
                    continue
                begun.add(action.target)
            elif action.kind is Kind.FREE and last.get(_making(action.target, graph), -1) > place:
                continue
            yield action


def _making(value: int, graph: Graph) -> Action:
    made = graph.producer[value]
    return Action(Kind.COMPUTE, -1 if made is None else made)
