"""The floor: what no schedule goes below while operations stay whole."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.graph import Graph


@dataclass(frozen=True)
class Floor:
    """The working set of the largest single operation, with everything that is there all the time.

    Attributes:
      nbytes: inputs and outputs of the step, and what the operation reads, makes and needs while it runs.
      op: its op id, -1 in a graph without operations.
    """

    nbytes: int
    op: int


def floor(graph: Graph) -> Floor:
    """Only kernels count: elementwise work and reductions can melt into others."""
    own = [v for v in graph.returned if v not in graph.reused and graph.values[v].role == "intermediate"]
    base = graph.resident_nbytes + sum(map(graph.nbytes, own))

    def counted(value: int) -> int:
        made = graph.producer[value]
        if made is None or value in graph.returned:
            return 0
        return 0 if graph.ops[made].fusion == "view" else graph.nbytes(value)

    largest, at = 0, -1
    for index, op in enumerate(graph.ops):
        if op.fusion == "kernel":
            needs = sum(map(counted, {*op.inputs, *op.outputs})) + op.workspace_nbytes
            if needs > largest or at < 0:
                largest, at = needs, index
    return Floor(base + largest, at)
