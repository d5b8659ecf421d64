"""Chooses the residuals of a pair of loops: a forward loop, and the backward loop that reads its stacks.

All trips of a loop are alike, so one choice holds for all: a value of the body is stacked, on the device or on the
host, or the backward body recomputes it from the others. For a given price per byte the cheapest choice is a minimum
cut; a sweep over prices gives the candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds, has_triton
from memplan.planning.graph import Graph, op_seconds

_WRITTEN_AND_READ = 2.0  # how often a stack crosses device memory: once in each loop
PRICES = tuple(10.0 ** (exponent / 4) for exponent in range(-56, -31))
"""Seconds per stacked byte, from almost none to more than a step takes."""
_ENDLESS = 1 << 30  # ticks that no cut pays: more than all costs together


@dataclass(frozen=True)
class Loop:
    """A forward loop and the backward loop that reads its stacks."""

    body: Graph  # of the forward loop
    trips: int  # of either loop
    runs: int  # how often the step runs the loops, if they are inside another
    # values of the body that the backward body always has: constants, slices of arrays from outside
    given: frozenset[int]
    needed: frozenset[int]  # values of the body that the backward body reads


@dataclass(frozen=True)
class Residuals:
    """Ids of the body's values that a forward loop stacks; the backward body recomputes all others."""

    kept: tuple[int, ...]  # on the device
    on_host: tuple[int, ...] = ()  # on the host

    @property
    def stacked(self) -> tuple[int, ...]:
        return tuple(sorted((*self.kept, *self.on_host)))

    @property
    def stacked_on_host(self) -> tuple[bool, ...]:
        """By stacked value: is it on the host?"""
        return tuple(value in self.on_host for value in self.stacked)


def stacked_nbytes(loop: Loop, residuals: Residuals | None) -> int:
    """Bytes of the stacks on the device; None: of the loop as it is written."""
    kept = loop.needed if residuals is None else residuals.kept
    return loop.trips * sum(map(loop.body.nbytes, kept))


def recomputed_ops(loop: Loop, residuals: Residuals) -> tuple[int, ...]:
    """Ops of the forward body that the backward body recomputes, in order."""
    there = loop.given.union(residuals.stacked)
    found: set[int] = set()
    waiting = list(loop.needed - there)
    while waiting:
        made = loop.body.producer[waiting.pop()]
        if made is not None and made not in found:
            found.add(made)
            waiting += [value for value in loop.body.ops[made].inputs if value not in there]
    return tuple(sorted(found))


def cheapest(loop: Loop, price: float, device: Device, offload: bool = False) -> Residuals:
    """The residuals with the least time and price of device bytes.

    Args:
      price: seconds that a byte on the device counts.
      offload: stacks may be on the host; their copies count in full.
    """
    cut = _Cut(loop, price, device, offload)
    stacked = cut.stacked()
    on_host = tuple(value for value in stacked if cut.is_on_host(value))
    return Residuals(tuple(value for value in stacked if value not in on_host), on_host)


def extra_seconds(loop: Loop, residuals: Residuals, device: Device) -> float:
    """Seconds of a step to recompute the values that are not stacked, and to copy those on the host."""
    cut = _Cut(loop, 0.0, device, bool(residuals.on_host))
    recomputed_s = sum(map(cut.recompute_seconds, recomputed_ops(loop, residuals)))
    return recomputed_s + sum(map(cut.offload_seconds, residuals.on_host))


@dataclass(frozen=True)
class _Cut:
    """A minimum cut, with a node per available value, per recomputed value, and per op that recomputes.

    Nodes on the source's side cost: an available value its stack, which is refunded if it is recomputed; an op its
    time. A recomputed value requires its op, an op the values that it reads.
    """

    loop: Loop
    price: float
    device: Device
    offload: bool

    def stacked(self) -> list[int]:
        """Values on the source's side that are not recomputed."""
        body, given = self.loop.body, self.loop.given
        count = len(body.values)
        source = 2 * count + len(body.ops)
        sink = source + 1
        costs, bonds = list[tuple[int, int, float]](), list[tuple[int, int]]()
        free = set(range(count)) - given
        for value in free:
            stack_s = self.offload_seconds(value) if self.is_on_host(value) else self._keep_seconds(value)
            costs.append((value, sink, stack_s))
            if value in self.loop.needed:
                bonds.append((source, value))
            made = body.producer[value]
            if made is not None and body.ops[made].recomputable:
                costs.append((source, count + value, stack_s))
                bonds += [(count + value, value), (count + value, 2 * count + made)]
        for number, op in enumerate(body.ops):
            costs.append((2 * count + number, sink, self.recompute_seconds(number)))
            bonds += [(2 * count + number, value) for value in set(op.inputs) - given]
        paid = chosen(sink + 1, source, sink, costs, bonds)
        return sorted(value for value in free if paid[value] and not paid[count + value])

    def is_on_host(self, value: int) -> bool:
        """Is a value cheaper on the host?"""
        return self.offload and self.offload_seconds(value) < self._keep_seconds(value)

    def _keep_seconds(self, value: int) -> float:
        """Seconds to write and read a stack, plus the price of its bytes."""
        nbytes = self.loop.trips * self.loop.body.nbytes(value)
        return nbytes * (self.price + self.loop.runs * _WRITTEN_AND_READ / self.device.memory_bandwidth)

    def offload_seconds(self, value: int) -> float:
        """Seconds to copy every slice out and in."""
        times = 2 * self.loop.trips * self.loop.runs
        return times * copy_seconds(self.loop.body.nbytes(value), self.device)

    def recompute_seconds(self, number: int) -> float:
        """Seconds of an op; 0 if it fuses into its readers: elementwise, and statistics of rows if Triton does both."""
        body, runs = self.loop.body, self.loop.trips * self.loop.runs
        op = body.ops[number]
        if op.fusion == "elementwise" or (op.along_rows and has_triton(self.device)):
            return 0.0
        return runs * op_seconds(body, op, self.device)


def chosen(
    size: int, source: int, sink: int, costs: Sequence[tuple[int, int, float]], bonds: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Mask of the nodes on the source's side of a minimum cut.

    Selects projects of which some require others (Picard, Management Science 22(11), 1976).

    Args:
      size: nodes, the source and the sink among them.
      costs: (start, end, seconds): paid if `start` is on the source's side and `end` is not.
      bonds: (start, end): if `start` is on the source's side, so is `end`.
    """
    bonds = list(dict.fromkeys(bonds))  # csr_matrix adds up duplicates, which would overflow an int32
    tick = (sum(seconds for *_, seconds in costs) or 1.0) / (_ENDLESS - 1)
    ticks = [*(int(seconds / tick) for *_, seconds in costs), *(_ENDLESS for _ in bonds)]
    starts, ends = zip(*((start, end) for start, end, *_ in (*costs, *bonds)), strict=True)
    network = csr_matrix((np.array(ticks, dtype=np.int32), (starts, ends)), shape=(size, size))
    rest = network - maximum_flow(network, source, sink).flow
    rest.data = np.maximum(rest.data, 0)
    rest.eliminate_zeros()
    found = np.zeros(size, dtype=bool)
    found[breadth_first_order(rest, source, return_predecessors=False)] = True
    return found
