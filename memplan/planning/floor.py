"""The floor: what no schedule goes below while operations stay whole."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.graph import Graph


@dataclass(frozen=True)
class Floor:
    """The working set of the largest single operation, with everything that is there all the time.

    Attributes:
      nbytes: inputs and outputs of the step, and what the operation reads, makes and needs while it runs.
      op: its op id, -1 in a graph without kernels.
      where: the same for messages.
    """

    nbytes: int
    op: int
    where: str = "no operation"


def floor(graph: Graph) -> Floor:
    """Only kernels count: elementwise work and reductions can melt into others."""
    own = [v for v in graph.returned if v not in graph.reused and graph.values[v].role == "intermediate"]
    base = graph.resident_nbytes + sum(map(graph.nbytes, own))
    largest, at = _working_set(graph)
    return Floor(base + largest, at, graph.ops[at].where) if at >= 0 else Floor(base, at)


def _working_set(graph: Graph) -> tuple[int, int]:
    """Bytes that the largest operation needs besides inputs and outputs of the graph, and its id."""
    there = _behind_outputs(graph)

    def counted(value: int) -> int:
        made = graph.producer[value]
        if made is None or value in there:
            return 0
        return 0 if graph.ops[made].fusion == "view" else graph.nbytes(value)

    largest, at = 0, -1
    for index, op in enumerate(graph.ops):
        if op.fusion == "kernel":
            inside = max((_working_set(body)[0] for body in op.bodies), default=op.workspace_nbytes)
            needs = sum(map(counted, {*op.inputs, *op.outputs})) + inside
            if needs > largest or at < 0:
                largest, at = needs, index
    return largest, at


def _behind_outputs(graph: Graph) -> set[int]:
    """The outputs, and what they are views of: it may live in the output's buffer, which is counted already."""
    found: set[int] = set()
    waiting = list(graph.outputs)
    while waiting:
        value = waiting.pop()
        made = graph.producer[value]
        if value not in found and made is not None and graph.ops[made].fusion == "view":
            waiting.extend(graph.ops[made].inputs)
        found.add(value)
    return found
