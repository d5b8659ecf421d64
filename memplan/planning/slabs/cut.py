"""The values of earlier loops that a loop over slabs reads, and those that it recomputes.

Each loop is a minimum cut. Loops are visited from the last to the first: the reads of later loops
are then known, and so are the values that a loop writes.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from memplan.planning.loops import minimum_cut
from memplan.planning.slabs.price import Pricer

# A loop recomputes a value in at most four times the time of its copy.
_MAX_RECOMPUTE = 4.0


@dataclass(frozen=True)
class SlabCuts:
    """Choices of the values that all loops read.

    They are made once, as they depend neither on the rows of a slab nor on the limits.
    """

    pricer: Pricer
    _made: dict[tuple[Any, ...], Mapping[int, int]] = field(default_factory=dict, init=False)

    def readers(
        self,
        weights: Mapping[int, float],
        shares: Mapping[int, int],
        on_device: Collection[int],
        max_recompute: float = _MAX_RECOMPUTE,
    ) -> Mapping[int, int]:
        """Value -> number of loops that read it (see `SlabCut`)."""
        question = (
            tuple(sorted(weights.items())),
            tuple(sorted(shares.items())),
            frozenset(on_device),
            max_recompute,
        )
        if question not in self._made:
            cut = SlabCut(self.pricer, weights, shares, on_device, max_recompute)
            self._made[question] = cut.run()
        return self._made[question]


@dataclass
class SlabCut:
    """One choice of the values that all loops read."""

    pricer: Pricer
    weights: Mapping[int, float]  # by level: a second of kernels in seconds of copies
    # value -> loops that share the costs of writing it, from an earlier choice
    shares: Mapping[int, int]
    on_device: Collection[int]  # values stored on the device: they need no copies
    # bound on the time to recompute a value, in units of its copy time
    max_recompute: float = _MAX_RECOMPUTE
    readers: dict[int, int] = field(default_factory=dict)  # value -> number of loops that read it

    def run(self) -> dict[int, int]:
        """Value -> number of loops that read it."""
        for level, (_, ops) in reversed([*enumerate(self.pricer.walls.by_level)]):
            for value in self._cut(level, ops):
                self.readers[value] = self.readers.get(value, 0) + 1
        return self.readers

    def _cut(self, level: int, level_ops: Collection[int]) -> Iterator[int]:
        """Values of earlier levels that the loop of a level reads rather than recomputes."""
        producer = self.pricer.graph.graph.producer
        needed = self._needed(level, level_ops)
        ops = self._recomputable(needed)
        values = sorted({value for op in ops for value, _ in self._slab_inputs[op]} | needed)
        if not values:
            return
        value_node = {value: number for number, value in enumerate(values)}
        op_node = {op: number for number, op in enumerate(sorted(ops), len(values))}
        source = len(value_node) + len(op_node)
        sink = source + 1
        weight = self.weights.get(level, 1.0)
        costs = [(op_node[op], sink, weight * self.pricer.op_seconds[op]) for op in ops]
        bonds = [(source, value_node[value]) for value in needed]
        for op in ops:
            bonds += [(op_node[op], value_node[value]) for value, _ in self._slab_inputs[op]]
        # by value: the node on the other side of the cut if the loop reads the value
        ends = {}
        for value in values:
            is_written = self._is_written(value)
            ends[value] = sink if is_written else op_node.get(producer[value] or 0, sink)
            costs.append((value_node[value], ends[value], self._read_seconds(value)))
        in_source = minimum_cut(sink + 1, source, sink, costs, bonds)
        for value, end in ends.items():
            if in_source[value_node[value]] and not in_source[end]:
                yield value

    @cached_property
    def _slab_inputs(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """By op of the loops: values that it reads by slabs and that ops make by slabs.

        Each comes with the op that makes it.
        """
        graph = self.pricer.graph
        ops = self.pricer.walls.ops
        inputs = dict[int, list[tuple[int, int]]]()
        for op in ops:
            makers = [(value, graph.maker(value, ops)) for value, _ in graph.along[op].reads]
            inputs[op] = [(value, maker) for value, maker in makers if maker is not None]
        return inputs

    def _needed(self, level: int, level_ops: Collection[int]) -> set[int]:
        """Values of earlier levels on which sums and written values of a level depend."""
        graph = self.pricer.graph.graph
        along = self.pricer.graph.along
        levels = self.pricer.walls.levels
        pending = []
        for op in level_ops:
            if along[op].reduces or any(map(self._is_written, graph.ops[op].outputs)):
                pending.append(op)
        visited = set(pending)
        needed = set[int]()
        while pending:
            for value, maker in self._slab_inputs[pending.pop()]:
                if levels[maker] < level:
                    needed.add(value)
                elif maker not in visited:
                    visited.add(maker)
                    pending.append(maker)
        return needed

    def _is_written(self, value: int) -> bool:
        return value in self.readers or value in self.pricer.walls.forced

    def _recomputable(self, needed: Collection[int]) -> set[int]:
        """Ops that may recompute the values: those at most `max_recompute` away."""
        producer = self.pricer.graph.graph.producer
        seconds = self.pricer.op_seconds
        copies_s = (self.pricer.copy_seconds[value] for value in needed)
        bound_s = self.max_recompute * max(copies_s, default=0.0)
        pending = [(seconds[op], op) for value in needed if (op := producer[value]) is not None]
        heapq.heapify(pending)
        ops = set[int]()
        while pending:
            path_s, op = heapq.heappop(pending)
            if op in ops or path_s > bound_s:
                continue
            ops.add(op)
            for _, maker in self._slab_inputs[op]:
                if maker not in ops:
                    heapq.heappush(pending, (path_s + seconds[maker], maker))
        return ops

    def _read_seconds(self, value: int) -> float:
        """Seconds to read a value, plus its share of the seconds to write it."""
        if value in self.on_device:
            return 0.0
        copy_s = self.pricer.copy_seconds[value]
        shares = max(self.shares.get(value, 1), self.readers.get(value, 0) + 1)
        is_forced = value in self.pricer.walls.forced
        return copy_s if is_forced else copy_s + copy_s / shares
