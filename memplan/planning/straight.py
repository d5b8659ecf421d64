"""A plan without fences: every operation once, in order, the rest left to the compiler."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.planning.graph import Graph
from memplan.planning.loop import Residuals
from memplan.planning.plan import Action, Kind, Plan

NAME = "loops"


def straight(graph: Graph, device: str, loops: Sequence[Residuals | None]) -> Plan:
    """One segment; `loops` as the graph's loops are."""
    return Plan(straight_actions(graph), graph.fingerprint, NAME, device, tuple(loops))


def straight_actions(graph: Graph) -> tuple[Action, ...]:
    """Every operation in order; every value ends with its last reader."""
    last = dict.fromkeys(range(len(graph.values)), -1)
    for number, op in enumerate(graph.ops):
        last.update(dict.fromkeys((*op.inputs, *op.outputs), number))
    actions: list[Action] = []
    for number, op in enumerate(graph.ops):
        actions.append(Action(Kind.COMPUTE, number))
        for value in dict.fromkeys((*op.inputs, *op.outputs)):
            passing = graph.values[value].role == "intermediate" and value not in graph.returned
            if last[value] == number and passing:
                actions.append(Action(Kind.FREE, value))
    return tuple(actions)
