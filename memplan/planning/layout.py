"""The program cut into segments, before anything is decided."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from memplan.planning.graph import Graph, Op


@dataclass(frozen=True)
class Layout:
    """The program cut into segments, before any decision.

    Attributes:
      graph: the program.
      segments: op ids per segment, views left out, in running order.
      fence_nbytes: a kernel that touches less than this needs no segment of its own.
      fuses_rows: the compiler makes statistics of rows in the kernel that normalizes them (`cost.has_triton`).
    """

    graph: Graph
    segments: tuple[tuple[int, ...], ...]
    fence_nbytes: int
    fuses_rows: bool = False

    @cached_property
    def home(self) -> dict[int, int]:
        """Segment that first makes each value."""
        return {
            value: number
            for number, ops in enumerate(self.segments)
            for op in ops
            for value in self.graph.ops[op].outputs
        }

    @cached_property
    def carriers(self) -> tuple[tuple[int, ...], ...]:
        """Values with a buffer of their own that each op reads, looking through views; inputs are left out."""
        roots: dict[int, tuple[int, ...]] = dict.fromkeys(self.graph.inputs, ())
        found: list[tuple[int, ...]] = []
        for op in self.graph.ops:
            behind = tuple(dict.fromkeys(root for value in op.inputs for root in roots[value]))
            found.append(behind)
            roots.update((value, behind if op.fusion == "view" else (value,)) for value in op.outputs)
        return tuple(found)

    @cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """Values each segment takes from earlier ones."""
        return tuple(
            frozenset(value for op in ops for value in self.carriers[op] if self.home[value] < number)
            for number, ops in enumerate(self.segments)
        )

    @cached_property
    def returned(self) -> frozenset[int]:
        """Values that the outputs are, or are views of."""
        behind = set()
        for value in self.graph.outputs:
            made = self.graph.producer[value]
            if made is not None:
                op = self.graph.ops[made]
                behind.update(self.carriers[made] if op.fusion == "view" else (value,))
        return frozenset(behind)

    @cached_property
    def fleeting(self) -> frozenset[int]:
        """Statistics of rows, and what is computed from them alone.

        One that outlives its segment costs another pass over the rows, there and wherever it is read.
        """
        found: set[int] = set()
        for number, op in enumerate(self.graph.ops if self.fuses_rows else ()):
            behind = self.carriers[number]
            if op.along_rows or (op.fusion == "elementwise" and behind and found.issuperset(behind)):
                found.update(op.outputs)
        return frozenset(found)

    def is_heavy(self, op: int) -> bool:
        """A kernel that gets a segment of its own."""
        return op in self._heavy

    @cached_property
    def _heavy(self) -> frozenset[int]:
        return frozenset(number for number, op in enumerate(self.graph.ops) if self._touched(op) >= self.fence_nbytes)

    def _touched(self, op: Op) -> int:
        """Bytes that a kernel reads, writes and works in; -1 for what is no kernel."""
        if op.fusion != "kernel":
            return -1
        return sum(map(self.graph.nbytes, (*op.outputs, *op.inputs))) + op.workspace_nbytes


def cut(graph: Graph, order: Sequence[int], fence_nbytes: int, fuses_rows: bool = False) -> Layout:
    """Cut an order into segments: a heavy kernel and the lighter work behind it."""
    probe = Layout(graph, (), fence_nbytes)
    segments: list[list[int]] = [[]]
    for op in order:
        if graph.ops[op].fusion == "view":
            continue
        if probe.is_heavy(op) and any(probe.is_heavy(other) for other in segments[-1]):
            segments.append([])
        segments[-1].append(op)
    return Layout(graph, tuple(map(tuple, segments)), fence_nbytes, fuses_rows)


def chop(graph: Graph, order: Sequence[int], length: int) -> Layout:
    """Cut an order into segments of `length` operations, wherever that falls."""
    ops = [op for op in order if graph.ops[op].fusion != "view"]
    segments = tuple(tuple(ops[first : first + length]) for first in range(0, len(ops), length))
    return Layout(graph, segments or ((),), sys.maxsize)
