"""A plan with fewer fences.

A fence keeps what runs again from running early. Where nothing has run twice so far, and where memory is far from the
budget, it only keeps the compiler from fusing across it.
"""

from __future__ import annotations

from dataclasses import replace

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
    return replace(plan, actions=tuple(actions))
