"""A plan without fences: every operation once, in order, the rest left to the compiler."""

from __future__ import annotations

from memplan.planning.graph import Graph
from memplan.planning.plan import Action, Kind, Plan

NAME = "loops"


def straight(graph: Graph, device: str) -> Plan:
    """One segment."""
    return Plan(straight_actions(graph), graph.fingerprint, NAME, device)


def straight_actions(graph: Graph) -> tuple[Action, ...]:
    """Every operation in order; every value ends with its last reader."""
    actions: list[Action] = []
    for number, op in enumerate(graph.ops):
        actions.append(Action(Kind.COMPUTE, number))
        for value in dict.fromkeys((*op.inputs, *op.outputs)):
            last = max(graph.readers[value], default=number)
            if last == number and graph.is_passing(value):
                actions.append(Action(Kind.FREE, value))
    return tuple(actions)
