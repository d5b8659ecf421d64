"""The program cut into segments, before anything is decided."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.planning.graph import Graph, Op

_LONGEST_CHAIN = 16  # of elementwise work that runs again wherever its result is read


@dataclass(frozen=True)
class Layout:
    """The program cut into segments, before any decision.

    Attributes:
      graph: the program.
      segments: op ids per segment, in running order, without the transparent ones.
      fence_nbytes: a kernel that touches less than this needs no segment of its own.
      transparent: ops that nothing is decided about, since they run wherever their results are read: views above all.
      fuses_rows: the compiler makes statistics of rows in the kernel that normalizes them (`cost.has_triton`).
    """

    graph: Graph
    segments: tuple[tuple[int, ...], ...]
    fence_nbytes: int
    transparent: frozenset[int]
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
        """Values with a buffer of their own that each op reads, behind transparent ones; inputs are left out."""
        roots: dict[int, tuple[int, ...]] = dict.fromkeys(self.graph.inputs, ())
        found: list[tuple[int, ...]] = []
        for number, op in enumerate(self.graph.ops):
            behind = tuple(dict.fromkeys(root for value in op.inputs for root in roots[value]))
            found.append(behind)
            roots.update((value, behind if number in self.transparent else (value,)) for value in op.outputs)
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
                behind.update(self.carriers[made] if made in self.transparent else (value,))
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
        """Bytes that a kernel reads, writes and works in; -1 for what is no kernel, and for copies."""
        if op.fusion != "kernel" or op.crosses_memories:
            return -1
        return sum(map(self.graph.nbytes, (*op.outputs, *op.inputs))) + op.workspace_nbytes


def cut(
    graph: Graph, order: Sequence[int], fence_nbytes: int, fuses_rows: bool = False, finely: bool = False
) -> Layout:
    """Cut an order into segments: a heavy kernel and the lighter work behind it.

    Args:
      finely: what needs the results of reductions gets a segment of its own, and elementwise work on one large value is
        transparent. Fewer values have to be there at once; memory is read more often.
    """
    transparent = _views(graph) | (_over_one_value(graph, fence_nbytes) if finely else set())
    probe = Layout(graph, (), fence_nbytes, frozenset(transparent), fuses_rows)
    segments: list[list[int]] = [[]]
    for op in order:
        if op in transparent:
            continue
        if probe.is_heavy(op) and any(probe.is_heavy(other) for other in segments[-1]):
            segments.append([])
        segments[-1].append(op)
    if finely:
        segments = [part for segment in segments for part in _parts(probe, segment)]
    return replace(probe, segments=tuple(map(tuple, segments)))


def chop(graph: Graph, order: Sequence[int], length: int) -> Layout:
    """Cut an order into segments of `length` operations, wherever that falls."""
    views = _views(graph)
    ops = [op for op in order if op not in views]
    segments = tuple(tuple(ops[first : first + length]) for first in range(0, len(ops), length))
    return Layout(graph, segments or ((),), sys.maxsize, frozenset(views))


def _views(graph: Graph) -> set[int]:
    return {number for number, op in enumerate(graph.ops) if op.fusion == "view"}


def _over_one_value(graph: Graph, least: int) -> set[int]:
    """Elementwise work on one value of at least so many bytes, for the sake of other such work or of reductions."""
    large = {value for value in range(len(graph.values)) if graph.nbytes(value) >= least}
    read = {value for op in graph.ops if op.fusion == "kernel" for value in op.inputs}.union(graph.outputs)
    found: set[int] = set()
    depth: dict[int, int] = {}  # of a value: ops of a chain that run wherever it is read
    for number, op in enumerate(graph.ops):
        below = max((depth.get(value, 0) for value in op.inputs), default=0)
        if op.fusion == "view":
            depth.update(dict.fromkeys(op.outputs, below))
        sources = large.intersection(op.inputs)
        if (
            op.fusion == "elementwise"
            and op.recomputable
            and below < _LONGEST_CHAIN
            and len(sources) == len(op.outputs) == 1
            and read.isdisjoint(op.outputs)
            and graph.readers[op.outputs[0]]
            and sum(map(graph.nbytes, sources)) <= sum(map(graph.nbytes, op.outputs))
        ):
            found.add(number)
            depth[op.outputs[0]] = below + 1
    return found


def _parts(layout: Layout, segment: Sequence[int]) -> list[list[int]]:
    """A segment, parted before large work that needs a reduction of the segment."""
    graph, least = layout.graph, layout.fence_nbytes
    parts: list[list[int]] = [[]]
    reduced: set[int] = set()  # in this part, and what is computed from it
    for number in segment:
        op = graph.ops[number]
        if not reduced.isdisjoint(layout.carriers[number]):
            if any(graph.nbytes(value) >= least for value in op.outputs):
                parts.append([])
                reduced.clear()
            else:
                reduced.update(op.outputs)
        parts[-1].append(number)
        rows = op.along_rows and layout.fuses_rows
        if op.fusion == "reduction" and not rows and any(graph.nbytes(value) >= least for value in op.inputs):
            reduced.update(op.outputs)
    return parts
