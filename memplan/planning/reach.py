"""What recomputation could need: for every segment, the values that it might take from before.

A segment reads some values in any case. Where one of them is dropped and computed again there, what it is computed
from is wanted instead, and so on: `Reach` follows these chains, a limited number of kernels and operations deep.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from memplan.planning.graph import Op
from memplan.planning.layout import Layout

Depth = tuple[int, int]  # kernels and operations of a chain


@dataclass(frozen=True)
class Reach:
    """Chains of recomputation in a layout.

    Attributes:
      least_nbytes: smaller values are kept whatever happens, and left out here.
      kernels, operations: how many of a chain may be kernels, and how long it may be.
      also: values that may be computed again in a segment however deep in a chain they are, as a known plan does.
    """

    layout: Layout
    least_nbytes: int
    kernels: int
    operations: int
    also: frozenset[tuple[int, int]] = frozenset()

    def is_decided(self, value: int) -> bool:
        """Is this a value to be decided about?"""
        layout = self.layout
        return value in layout.home and layout.graph.nbytes(value) >= self.least_nbytes and value not in layout.returned

    def op_of(self, value: int) -> Op:
        """The operation that makes a value."""
        made = self.layout.graph.producer[value]
        assert made is not None, "arguments are not decided about"
        return self.layout.graph.ops[made]

    def sources(self, value: int) -> list[int]:
        """The values to be decided about that a value is computed from."""
        made = self.layout.graph.producer[value]
        assert made is not None
        return [source for source in self.layout.carriers[made] if self.is_decided(source)]

    @cached_property
    def wanted(self) -> tuple[dict[int, Depth], ...]:
        """Per segment: value -> the depth at which a chain first leads to it."""
        return tuple(map(self._wanted_by, range(len(self.layout.segments))))

    def _wanted_by(self, segment: int) -> dict[int, Depth]:
        found = {value: (0, 0) for value in self.layout.reads[segment] if self.is_decided(value)}
        waiting = deque(found)
        while waiting:
            value = waiting.popleft()
            kernels, operations = self._behind(value, found[value])
            if not self._is_allowed(value, segment, (kernels, operations)):
                continue
            for source in self.sources(value):
                known = found.get(source, (kernels, operations))
                depth = min(kernels, known[0]), min(operations, known[1])
                if source not in found or depth != known:
                    found[source] = depth
                    waiting.append(source)
        return found

    def may_drop(self, value: int, segment: int) -> bool:
        """May it be computed again in this segment, which wants it?"""
        return self._is_allowed(value, segment, self._behind(value, self.wanted[segment][value]))

    @cached_property
    def times(self) -> dict[int, tuple[int, ...]]:
        """value -> the segments that might want it, ascending."""
        found: dict[int, list[int]] = {}
        for segment, wanted in enumerate(self.wanted):
            for value in wanted:
                found.setdefault(value, []).append(segment)
        return {value: tuple(segments) for value, segments in found.items()}

    @cached_property
    def read_by_kernel(self) -> tuple[frozenset[int], ...]:
        """Per segment: values that its own kernels read."""
        ops, carriers = self.layout.graph.ops, self.layout.carriers
        return tuple(
            frozenset(value for op in segment if ops[op].fusion == "kernel" for value in carriers[op])
            for segment in self.layout.segments
        )

    def _behind(self, value: int, depth: Depth) -> Depth:
        return depth[0] + (self.op_of(value).fusion == "kernel"), depth[1] + 1

    def _is_allowed(self, value: int, segment: int, depth: Depth) -> bool:
        if (value, segment) in self.also:
            return True
        return self.op_of(value).recomputable and depth[0] <= self.kernels and depth[1] <= self.operations
