"""A plan without what nobody needs: runs and copies whose results end before they are read.

A planner that drops a value and computes it again before its first reader leaves the first run without any purpose. The
compiler would leave it out too; so the plan says what will happen.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.planning.graph import Graph
from memplan.planning.plan import Action, Kind, Plan


def tidied(plan: Plan, graph: Graph) -> Plan:
    """The plan without useless runs and copies, or the ends of what is not there; itself where all is of use."""
    useful = _useful(plan, graph)
    device, host = set(graph.inputs), set[int]()
    actions: list[Action] = []
    for action, wanted in zip(plan.actions, useful, strict=True):
        match action.kind:
            case Kind.COMPUTE if wanted:
                device.update(graph.ops[action.target].outputs)
            case Kind.PREFETCH if wanted:
                device.add(action.target)
            case Kind.OFFLOAD if wanted:
                host.add(action.target)
            case Kind.FREE:
                wanted = action.target in device
                device.discard(action.target)
            case Kind.RELEASE:
                wanted = action.target in host
                host.discard(action.target)
        if wanted:
            actions.append(action)
    return plan if len(actions) == len(plan.actions) else replace(plan, actions=tuple(actions))


def _useful(plan: Plan, graph: Graph) -> list[bool]:
    """Per action: does anything that comes later need it? Ends and fences are useful."""
    device, host = set(graph.outputs), set[int]()  # what is needed from there on
    found: list[bool] = []
    for action in reversed(plan.actions):
        useful, target = True, action.target
        match action.kind:
            case Kind.COMPUTE:
                op = graph.ops[target]
                useful = not op.recomputable or not device.isdisjoint(op.outputs)
                if useful:
                    device.difference_update(op.outputs)
                    device.update(op.inputs)
            case Kind.PREFETCH:
                useful = target in device
                if useful:
                    device.discard(target)
                    host.add(target)
            case Kind.OFFLOAD:
                useful = target in host
                if useful:
                    host.discard(target)
                    device.add(target)
            case Kind.FREE:
                device.discard(target)
            case Kind.RELEASE:
                host.discard(target)
        found.append(useful)
    return found[::-1]
