"""Which values of earlier loops a loop over slabs reads, and which it recomputes: minimum cuts.

Loops are visited from the last to the first: later loops' reads are then known, and so is what a loop writes.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memplan.planning.loops import chosen
from memplan.planning.slabs.price import Pricer


@dataclass
class SlabCut:
    """One choice of the values that all loops read."""

    pricer: Pricer
    weights: Mapping[int, float]  # by level: a second of kernels in seconds of copies
    shares: Mapping[int, int]  # value -> loops that share the costs of writing it, from an earlier choice
    on_device: Collection[int]  # values stored on the device: they need no copies
    max_recompute: float = 4.0  # bound on the time to recompute a value, in units of its copy time
    found: dict[int, int] = field(default_factory=dict)  # value -> number of loops that read it

    def run(self) -> dict[int, int]:
        """Value -> number of loops that read it."""
        for level, (_, ops) in reversed([*enumerate(self.pricer.walls.by_level)]):
            for value in self._cut(level, ops):
                self.found[value] = self.found.get(value, 0) + 1
        return self.found

    def _cut(self, level: int, own: Collection[int]) -> Iterator[int]:
        """Values of earlier levels that the loop of a level reads rather than recomputes."""
        producer = self.pricer.graph.graph.producer
        needed = self._needed(level, own)
        ops = self._recomputable(needed)
        values = sorted({value for op in ops for value, _ in self._made[op]} | needed)
        if not values:
            return
        node = {value: number for number, value in enumerate(values)}
        again = {op: number for number, op in enumerate(sorted(ops), len(values))}
        source, sink = len(node) + len(again), len(node) + len(again) + 1
        weight = self.weights.get(level, 1.0)
        costs = [(again[op], sink, weight * self.pricer.op_seconds[op]) for op in ops]
        bonds = [(source, node[value]) for value in needed]
        bonds += [(again[op], node[value]) for op in ops for value, _ in self._made[op]]
        ends = {value: sink if self._is_written(value) else again.get(producer[value] or 0, sink) for value in values}
        costs += [(node[value], end, self._read_seconds(value)) for value, end in ends.items()]
        paid = chosen(sink + 1, source, sink, costs, bonds)
        yield from (value for value, end in ends.items() if paid[node[value]] and not paid[end])

    @cached_property
    def _made(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """By op of the loops: values that it reads by slabs and other ops make by slabs, and those ops."""
        graph, ops = self.pricer.graph, self.pricer.walls.ops
        made = {op: [(value, graph.maker(value, ops)) for value, _ in graph.along[op].reads] for op in ops}
        return {op: [(value, one) for value, one in found if one is not None] for op, found in made.items()}

    def _needed(self, level: int, own: Collection[int]) -> set[int]:
        """Values of earlier levels on which sums and written values of a level depend."""
        graph, along, levels = self.pricer.graph.graph, self.pricer.graph.along, self.pricer.walls.levels
        waiting = [op for op in own if along[op].reduces or any(map(self._is_written, graph.ops[op].outputs))]
        seen, needed = set(waiting), set[int]()
        while waiting:
            for value, made in self._made[waiting.pop()]:
                if levels[made] < level:
                    needed.add(value)
                elif made not in seen:
                    seen.add(made)
                    waiting.append(made)
        return needed

    def _is_written(self, value: int) -> bool:
        return value in self.found or value in self.pricer.walls.forced

    def _recomputable(self, needed: Collection[int]) -> set[int]:
        """Ops that may recompute the values: those at most `max_recompute` away."""
        producer, seconds = self.pricer.graph.graph.producer, self.pricer.op_seconds
        max_recompute = self.max_recompute * max((self.pricer.copy_seconds[value] for value in needed), default=0.0)
        waiting = [(seconds[made], made) for value in needed if (made := producer[value]) is not None]
        heapq.heapify(waiting)
        found = set[int]()
        while waiting:
            so_far, op = heapq.heappop(waiting)
            if op in found or so_far > max_recompute:
                continue
            found.add(op)
            for _, made in self._made[op]:
                if made not in found:
                    heapq.heappush(waiting, (so_far + seconds[made], made))
        return found

    def _read_seconds(self, value: int) -> float:
        """Seconds to read a value, plus its share of the seconds to write it."""
        if value in self.on_device:
            return 0.0
        once = self.pricer.copy_seconds[value]
        shared = max(self.shares.get(value, 1), self.found.get(value, 0) + 1)
        return once if value in self.pricer.walls.forced else once + once / shared
