"""Which values loops over slabs write for later ones, and where: what takes the least time under both budgets.

Every loop, the last one first, takes what it needs of earlier levels as a minimum cut gives it: a value is read from
where its loop wrote it, or made again from others. What is written lies in host memory, or on the device while there is
room. The replay of the loops, a stream for kernels and one each way for copies, says which choice is the fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds
from memplan.planning.graph import op_seconds
from memplan.planning.min_cut import chosen
from memplan.planning.slabs import SlabGraph, SlabLoop, Slabs, arrange, levels_of, slab_rows, trips_of

_COMPUTE_WEIGHTS = (
    1.0,
    0.3,
    3.0,
)  # of a second of kernels, by a second on the link: either may be what a loop waits for
_ROUNDS = 3  # a value's writing is shared out among the loops that read it, as far as the last round knows them
_LAUNCH_S = 1e-5  # of a kernel in a loop, and of the trip around it


@dataclass(frozen=True)
class Price:
    """What a program in slabs takes.

    Attributes:
      seconds: of its loops and its other ops, by the replay.
      device_bytes: of a trip of a loop, what is stored on the device and what is resident, at the most.
      host_bytes: of what is stored on the host, at the most.
    """

    seconds: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Limits:
    """Bytes that may be taken, and the bytes that are resident in any case (arguments, outputs)."""

    device_bytes: int
    host_bytes: int
    resident_bytes: int


class Choice:
    """Choices for one axis, one set of ops and one number of rows."""

    def __init__(self, graph: SlabGraph, bare: Slabs, device: Device):
        self.graph, self.bare, self.device = graph, bare, device
        self.trips = trips_of(graph, bare)
        self.levels = levels_of(graph, bare)

    def best(self, limits: Limits) -> tuple[Slabs, Price]:
        """The fastest that fits, or else what takes the least."""
        found = [self.placed(slabs, limits) for slabs in self.candidates()]
        priced = [(slabs, self.price(slabs, limits)) for slabs in dict.fromkeys(found)]
        return min(priced, key=lambda one: (excess(one[1], limits), one[1].seconds))

    def may_fit(self, limits: Limits) -> bool:
        """With everything on the host, and one choice of what is written, a trip of every loop fits."""
        first = next(self.candidates())
        return excess(self.price(self.placed(first, limits), limits), limits) == 0

    def candidates(self) -> Iterator[Slabs]:
        """What is written, everything on the host: for each weight of kernels against copies."""
        for weight in _COMPUTE_WEIGHTS:
            shares: Mapping[int, int] = {}
            for _ in range(_ROUNDS):
                shares = self._reads(weight, shares)
                yield replace(self.bare, stored=frozenset(shares))

    def _reads(self, weight: float, shares: Mapping[int, int]) -> dict[int, int]:
        """Value -> loops that read it, where its writing is shared by as many as `shares` says."""
        found: dict[int, int] = {}
        for level in range(max(self.levels[op] for op in self.bare.ops), -1, -1):
            for value in self._cut(level, weight, shares, found):
                found[value] = found.get(value, 0) + 1
        return found

    def _cut(self, level: int, weight: float, shares: Mapping[int, int], known: Mapping[int, int]) -> Iterable[int]:
        """Values of earlier levels that the loop of a level reads."""
        graph, along = self.graph.graph, self.graph.along
        needed, ops = self._needs(level, known)
        if not needed:
            return ()
        values = sorted({value for op in ops for value, _ in along[op].reads} | needed)
        node = {("value", value): number for number, value in enumerate(values)}
        node |= {("op", op): number for number, op in enumerate(sorted(ops), len(values))}
        source, sink = len(node), len(node) + 1
        costs = [(node["op", op], sink, weight * self.op_seconds[op]) for op in ops]
        bonds = [(source, node["value", value]) for value in needed]
        bonds += [(node["op", op], node["value", value]) for op in ops for value, _ in along[op].reads]
        for value in values:
            made = graph.producer[value]
            if made in ops:
                costs.append((node["value", value], node["op", made], self._read_seconds(value, shares, known)))
        paid = chosen(sink + 1, source, sink, costs, bonds)
        return [
            value
            for value in values
            if graph.producer[value] in ops
            and paid[node["value", value]]
            and not paid[node["op", graph.producer[value]]]
        ]

    def _needs(self, level: int, known: Mapping[int, int]) -> tuple[set[int], set[int]]:
        """Values that the ops of a level read of earlier ones, and the ops that can make those again."""
        graph, along = self.graph.graph, self.graph.along
        wanted = {
            op for op in self.bare.ops if self.levels[op] == level and (along[op].reduces or self._written(op, known))
        }
        needed, ops, waiting = set[int](), set[int](), list(wanted)
        seen = set(wanted)
        while waiting:
            op = waiting.pop()
            for value, _ in along[op].reads:
                made = graph.producer[value]
                if made is None or made not in self.bare.ops:
                    continue
                if self.levels[made] < level:
                    ops.add(made)
                    if self.levels[op] == level:
                        needed.add(value)
                if made not in seen:
                    seen.add(made)
                    waiting.append(made)
        return needed, ops

    def _written(self, op: int, known: Mapping[int, int]) -> bool:
        return any(value in known or value in self.forced for value in self.graph.graph.ops[op].outputs)

    @cached_property
    def forced(self) -> frozenset[int]:
        """Values that are written, whatever is stored."""
        loops = arrange(self.graph, replace(self.bare, stored=frozenset()))
        return frozenset(value for one in loops if isinstance(one, SlabLoop) for value in one.writes)

    @cached_property
    def op_seconds(self) -> Mapping[int, float]:
        """Of ops that are kernels; elementwise ones are fused into their readers."""
        graph = self.graph.graph
        return {
            number: op_seconds(graph, op, self.device) if op.fusion in ("kernel", "reduction") else 0.0
            for number, op in enumerate(graph.ops)
        }

    def _read_seconds(self, value: int, shares: Mapping[int, int], known: Mapping[int, int]) -> float:
        once = copy_seconds(self.graph.graph.nbytes(value), self.device)
        if value in self.forced:
            return once
        return once + once / max(shares.get(value, 1), known.get(value, 0) + 1)

    def placed(self, slabs: Slabs, limits: Limits) -> Slabs:
        """With everything on the host but what fits on the device beside the loops, the most copied first."""
        loops = [one for one in arrange(self.graph, slabs) if isinstance(one, SlabLoop)]
        lives = _lifetimes(self.graph, loops)
        on_host = set(lives)
        everything = replace(slabs, on_host=frozenset(lives))
        free = [limits.device_bytes - limits.resident_bytes - self.trip_bytes(loop, everything) for loop in loops]
        for value in sorted(lives, key=lambda value: self._worth(value, loops, lives[value]), reverse=True):
            first, last = lives[value]
            nbytes = self.graph.graph.nbytes(value)
            takes = {loop: nbytes * (1 + (value in loops[loop].reads)) for loop in range(first, last)}
            if all(free[loop] >= more for loop, more in takes.items()):
                on_host.discard(value)
                for loop, more in takes.items():
                    free[loop] -= more
        return replace(slabs, on_host=frozenset(on_host))

    def _worth(self, value: int, loops: Sequence[SlabLoop], life: tuple[int, int]) -> float:
        """Times that it is copied, by the loops that it would be on the device for."""
        return (1 + sum(value in loop.reads for loop in loops)) / (life[1] - life[0])

    def trip_bytes(self, loop: SlabLoop, slabs: Slabs) -> int:
        """Of one trip: windows and slabs that are copied twice over, and the op that has most at once.

        XLA lays an array on the device that kernels read by slabs out anew as they want it, whole and before the loop.
        """
        graph = self.graph.graph
        again = sum(graph.nbytes(value) for value in loop.reads if value not in slabs.on_host)
        copied = sum(2 * self._window(value, loop) for value in loop.reads)
        copied += sum(2 * self._window(value, loop) for value in loop.writes)
        most = 0
        for number in loop.ops:
            op = graph.ops[number]
            if op.fusion == "kernel":
                along = self.graph.along[number]
                touched = {value for value, _ in along.reads} | {v for v in op.outputs if v in loop.spans}
                most = max(most, 2 * sum(self._window(value, loop) for value in touched))
        return again + copied + most

    def _window(self, value: int, loop: SlabLoop) -> int:
        low, high = loop.spans[value]
        return self.graph.graph.nbytes(value) * (high - low) // self.graph.sizes[value]

    def price(self, slabs: Slabs, limits: Limits) -> Price:
        arranged = arrange(self.graph, slabs)
        loops = [one for one in arranged if isinstance(one, SlabLoop)]
        outside = sum(self.op_seconds[one] for one in arranged if not isinstance(one, SlabLoop))
        lives = _lifetimes(self.graph, loops)
        host, device = [0] * len(loops), [limits.resident_bytes + self.trip_bytes(loop, slabs) for loop in loops]
        for value, (first, last) in lives.items():
            there = host if value in slabs.on_host else device
            for loop in range(first, last):
                there[loop] += self.graph.graph.nbytes(value)
        seconds = outside + sum(self.loop_seconds(loop, slabs) for loop in loops)
        return Price(seconds, max(device, default=0), max(host, default=0))

    def loop_seconds(self, loop: SlabLoop, slabs: Slabs) -> float:
        """The longest of its three streams, and what a trip takes in any case."""
        nbytes = self.graph.graph.nbytes
        read = sum(copy_seconds(nbytes(value), self.device) for value in loop.reads if value in slabs.on_host)
        written = sum(copy_seconds(nbytes(value), self.device) for value in loop.writes if value in slabs.on_host)
        kernels = 0.0
        for number in loop.ops:
            base = self.graph.along[number].base
            low, high = loop.spans.get(base, (0, 1))
            rows = slab_rows(self.graph, slabs, base)
            kernels += self.op_seconds[number] * (
                max((high - low) / rows, 1.0) if not self.graph.along[number].reduces else 1.0
            )
        launches = _LAUNCH_S * (1 + sum(self.op_seconds[number] > 0 for number in loop.ops))
        return max(read, written, kernels) + self.trips * launches

    def _rim(self, number: int, loop: SlabLoop, slabs: Slabs) -> float:
        """The rows that an op makes in a trip, by those of a slab."""
        one = self.graph.along[number]
        if one.reduces:
            return 1.0
        low, high = loop.spans[one.base]
        return (high - low) / slab_rows(self.graph, slabs, one.base)


def excess(price: Price, limits: Limits) -> int:
    """Bytes beyond the limits."""
    return max(price.device_bytes - limits.device_bytes, 0) + max(price.host_bytes - limits.host_bytes, 0)


def _lifetimes(graph: SlabGraph, loops: Sequence[SlabLoop]) -> dict[int, tuple[int, int]]:
    """Of what loops write: from the loop that writes it until behind the last that reads it."""
    found: dict[int, tuple[int, int]] = {}
    for number, loop in enumerate(loops):
        found.update((value, (number, number + 1)) for value in loop.writes)
        for value in loop.reads:
            if value in found:
                found[value] = found[value][0], number + 1
    return found
