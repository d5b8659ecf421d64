"""All-reduce over the axes of a machine: its phases, what they cost, and the cheapest.

A reduce-scatter over one group of axes on the way down leaves each device a piece; what follows works on that piece; an
all-gather over the same group on the way up brings the pieces together. Cho et al., PowerAI DDL (arXiv:1708.02188), do
this with a ring per level of the machine. A group may also be several axes taken as one.

Seconds are latency and bandwidth of the slowest link in a group (Thakur, Rabenseifner, Gropp: Optimization of
Collective Communication Operations in MPICH, 2005). Along one axis an all-reduce goes in a tree's few steps; over
several at once in a ring, through every node once, which keeps all links busy but takes a step for every device. Pieces
are not padded, and phases do not overlap. An engine with better trees across hosts (NCCL's) may do a flat group faster.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.hardware.topology import Topology

LAUNCH_S = 10e-6
"""Assumed: seconds that a collective takes before its first byte, whatever the links."""

_SAME = 1 + 1e-12  # costs this close differ by rounding alone


@dataclass(frozen=True, slots=True)
class Phase:
    """One group of axes, taken together as one flat ring."""

    axes: tuple[str, ...]  # names
    # a reduce-scatter on the way down and an all-gather on the way up, with what follows working on the pieces; False:
    # an all-reduce of what there is
    scatters: bool


def _groups(names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each non-empty group of `names`, and what is left; in their order."""
    for size in range(1, len(names) + 1):
        for group in itertools.combinations(names, size):
            yield group, tuple(name for name in names if name not in group)


@dataclass(frozen=True, slots=True)
class _Ring:
    """A group of axes as one flat ring; all rings of the other axes' devices run beside it."""

    size: int  # devices
    latency_s: float  # of its slowest step
    # seconds per byte of its slowest link. A ring enters and leaves a node once, but the rings beside it that start in
    # the same node pass the same link if it is shared.
    slowness: float
    # axes that the ring crosses. One of size 1 is not crossed: a ring within one host never sees the network.
    levels: int

    def scatter_s(self, nbytes: float, launch_s: float) -> float:
        """A reduce-scatter of `nbytes` per device, or the all-gather that undoes it."""
        return launch_s + (self.size - 1) * self.latency_s + self._wire_s(nbytes) if self.size > 1 else 0.0

    def reduce_s(self, nbytes: float, launch_s: float) -> float:
        """An all-reduce: around the ring, or with as many bytes along trees, whose steps are the logarithm."""
        steps = 2 * (self.size - 1).bit_length() if self.levels == 1 else 2 * (self.size - 1)
        return launch_s + steps * self.latency_s + 2 * self._wire_s(nbytes) if self.size > 1 else 0.0

    def phase_s(self, nbytes: float, scatters: bool, launch_s: float) -> float:
        return 2 * self.scatter_s(nbytes, launch_s) if scatters else self.reduce_s(nbytes, launch_s)

    def _wire_s(self, nbytes: float) -> float:
        return (self.size - 1) / self.size * nbytes * self.slowness


@functools.lru_cache(maxsize=1024)  # who makes buckets asks for the same few rings 100,000 times
def _ring(topology: Topology, names: tuple[str, ...]) -> _Ring:
    axes = [axis for axis in map(topology.axis, names) if axis.size > 1]
    # rings that leave one node of a shared level at the same time
    beside = [[inner.size for inner in topology.inside(axis.name) if inner.name not in names] for axis in axes]
    shares = [math.prod(sizes) if axis.shared else 1 for axis, sizes in zip(axes, beside, strict=True)]
    return _Ring(
        size=math.prod(axis.size for axis in axes),
        latency_s=max((axis.latency_s for axis in axes), default=0.0),
        slowness=max((share / axis.bandwidth for share, axis in zip(shares, axes, strict=True)), default=0.0),
        levels=len(axes),
    )


def all_reduce_seconds(
    topology: Topology, axes: tuple[str, ...], nbytes: float, *, launch_s: float = LAUNCH_S
) -> float:
    """Seconds of one all-reduce of `nbytes` per device over a group of axes, in a tree or as one flat ring."""
    return _ring(topology, axes).reduce_s(nbytes, launch_s)


def reduce_scatter_seconds(
    topology: Topology, axes: tuple[str, ...], nbytes: float, *, launch_s: float = LAUNCH_S
) -> float:
    """Seconds of one reduce-scatter; `nbytes` per device before it. The all-gather that undoes it takes as long."""
    return _ring(topology, axes).scatter_s(nbytes, launch_s)


def cheapest(topology: Topology, nbytes: float) -> tuple[Phase, ...]:
    """The phases of the all-reduce of `nbytes` per device that takes least time; of equals, the fewest collectives.

    The last is an all-reduce; without phases there is nothing to do.
    What is left to do depends on the axes that are left and the pieces' size alone, so each such state is solved once.
    """
    names = tuple(axis.name for axis in topology.axes if axis.size > 1)

    @functools.cache
    def best(left: tuple[str, ...], pieces: int) -> tuple[float, int, tuple[Phase, ...]]:
        """Seconds, collectives and phases over the axes that are left, with `pieces` of the bytes each."""
        ways: list[tuple[float, int, tuple[Phase, ...]]] = []
        for group, rest in _groups(left):
            ring = _ring(topology, group)
            for scatters in (True, False) if rest else (False,):
                here = ring.phase_s(nbytes / pieces, scatters, LAUNCH_S)
                later, calls, phases = best(rest, pieces * ring.size if scatters else pieces) if rest else (0.0, 0, ())
                ways.append((here + later, calls + (2 if scatters else 1), (Phase(group, scatters), *phases)))
        shortest = min(seconds for seconds, *_ in ways)
        return min((way for way in ways if way[0] <= shortest * _SAME), key=lambda way: way[1])

    return best(names, 1)[2] if names else ()
