"""All-reduce over the axes of a machine: its phases, their costs, and the cheapest.

A reduce-scatter over one group of axes on the way down leaves each device a piece. The next phases
work on that piece. An all-gather over the same group on the way up brings the pieces together. Cho
et al., PowerAI DDL (arXiv:1708.02188), do this with a ring per level of the machine. A group may
also be several axes taken as one.

Seconds are latency and bandwidth of the slowest link in a group (Thakur, Rabenseifner, Gropp:
Optimization of Collective Communication Operations in MPICH, 2005). An all-reduce moves the bytes
of a ring, and takes the few steps of a tree along each axis, as NCCL's double binary trees do
(https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4). A
reduce-scatter and an all-gather are rings, with a step for every device. Pieces are not padded, and
phases do not overlap.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.hardware.topology import Topology

LAUNCH_S = 10e-6
"""Assumed: seconds that a collective takes before its first byte, whatever the links."""

_SAME = 1 + 1e-12  # costs within this factor differ by rounding alone


@dataclass(frozen=True, slots=True)
class Phase:
    """One group of axes, taken together as one flat ring."""

    axes: tuple[str, ...]  # names
    # True: a reduce-scatter on the way down and an all-gather on the way up, between which the next
    # phases work on the pieces; False: an all-reduce of the current piece
    scatters: bool


def _splits(names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each non-empty group of `names`, and the remaining names; in their order."""
    for size in range(1, len(names) + 1):
        for group in itertools.combinations(names, size):
            yield group, tuple(name for name in names if name not in group)


@dataclass(frozen=True, slots=True)
class _Ring:
    """A group of axes as one flat ring; the rings of the other axes' devices run concurrently."""

    size: int  # devices
    latency_s: float  # of its slowest step
    tree_s: float  # latency of a tree along each axis, there and back
    # seconds per byte of its slowest link. A ring enters and leaves a node once, but concurrent
    # rings that start in the same node pass the same link if it is shared.
    slowness: float

    def scatter_s(self, nbytes: float, launch_s: float) -> float:
        """A reduce-scatter of `nbytes` per device, or the all-gather that undoes it."""
        if self.size <= 1:
            return 0.0
        return launch_s + (self.size - 1) * self.latency_s + self._wire_s(nbytes)

    def reduce_s(self, nbytes: float, launch_s: float) -> float:
        """An all-reduce along trees."""
        if self.size <= 1:
            return 0.0
        return launch_s + self.tree_s + 2 * self._wire_s(nbytes)

    def phase_s(self, nbytes: float, scatters: bool, launch_s: float) -> float:
        if scatters:
            return 2 * self.scatter_s(nbytes, launch_s)
        return self.reduce_s(nbytes, launch_s)

    def _wire_s(self, nbytes: float) -> float:
        return (self.size - 1) / self.size * nbytes * self.slowness


@functools.lru_cache(maxsize=1024)  # bucketing asks for the same few rings 100,000 times
def _ring(topology: Topology, names: tuple[str, ...]) -> _Ring:
    axes = [axis for axis in map(topology.axis, names) if axis.size > 1]
    slowness = []
    for axis in axes:
        # rings that leave one node of a shared level at the same time
        inner_axes = topology.inside(axis.name)
        rings = math.prod(inner.size for inner in inner_axes if inner.name not in names)
        slowness.append((rings if axis.shared else 1) / axis.bandwidth)
    return _Ring(
        size=math.prod(axis.size for axis in axes),
        latency_s=max((axis.latency_s for axis in axes), default=0.0),
        tree_s=sum(2 * (axis.size - 1).bit_length() * axis.latency_s for axis in axes),
        slowness=max(slowness, default=0.0),
    )


def all_reduce_seconds(
    topology: Topology, axes: tuple[str, ...], nbytes: float, *, launch_s: float = LAUNCH_S
) -> float:
    """Seconds of one all-reduce of `nbytes` per device over a group of axes."""
    return _ring(topology, axes).reduce_s(nbytes, launch_s)


def reduce_scatter_seconds(
    topology: Topology, axes: tuple[str, ...], nbytes: float, *, launch_s: float = LAUNCH_S
) -> float:
    """Seconds of one reduce-scatter of `nbytes` per device.

    The all-gather that undoes it takes as long.
    """
    return _ring(topology, axes).scatter_s(nbytes, launch_s)


def cheapest(topology: Topology, nbytes: float) -> tuple[Phase, ...]:
    """The phases of the fastest all-reduce of `nbytes` per device.

    Of equally fast ones, those with the fewest collectives. The last phase is an all-reduce; on a
    single device there are no phases.
    """
    names = tuple(axis.name for axis in topology.axes if axis.size > 1)

    # The remaining work depends on the remaining axes and the size of the pieces alone, so each
    # such state is solved once.
    @functools.cache
    def best(axes: tuple[str, ...], pieces: int) -> tuple[float, int, tuple[Phase, ...]]:
        """Seconds, collectives and phases over these axes, with `pieces` of the bytes each."""
        candidates: list[tuple[float, int, tuple[Phase, ...]]] = []
        for group, remaining in _splits(axes):
            ring = _ring(topology, group)
            for scatters in (True, False) if remaining else (False,):
                seconds = ring.phase_s(nbytes / pieces, scatters, LAUNCH_S)
                calls = 2 if scatters else 1
                phases = (Phase(group, scatters),)
                if remaining:
                    next_pieces = pieces * ring.size if scatters else pieces
                    next_seconds, next_calls, next_phases = best(remaining, next_pieces)
                    seconds += next_seconds
                    calls += next_calls
                    phases += next_phases
                candidates.append((seconds, calls, phases))
        shortest_s = min(seconds for seconds, *_ in candidates)
        fastest = (candidate for candidate in candidates if candidate[0] <= shortest_s * _SAME)
        return min(fastest, key=lambda candidate: candidate[1])

    return best(names, 1)[2] if names else ()
