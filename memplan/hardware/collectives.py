"""Seconds of collectives over the axes of a machine.

Seconds are steps and bytes, as NCCL counts them to choose an algorithm
(https://github.com/NVIDIA/nccl, src/graph/tuning.cc). A reduce-scatter and an all-gather are rings.
A ring takes a step for every device, most of them inside of a host. An all-reduce is a ring or a
pair of trees, whichever is faster
(https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4). A tree takes
few steps along each axis. Its bytes pass a link up and down; between two hosts, each of which is
the root of one of the trees, only one way.

XLA's own kernels for small sums of one host are experimental, and off unless
`xla_gpu_experimental_use_collective_kernels` asks for them; they are not counted.
"""

import functools
import math
from dataclasses import dataclass

from memplan.hardware.topology import Topology

LAUNCH_S = 10e-6
"""Assumed: seconds that a collective takes before its first byte, whatever the links."""

_TREE_EFFICIENCY = 0.92
"""The share of a link's bandwidth that a tree achieves, as NCCL's tuner has it."""


@dataclass(frozen=True, slots=True)
class _Ring:
    """A group of axes as one flat ring; the rings of the other axes' devices run concurrently."""

    size: int  # devices
    ring_s: float  # latency of the steps around it
    tree_s: float  # latency of a tree along each axis, there and back
    # seconds per byte of its slowest link. A ring enters and leaves a node once, but concurrent
    # rings that start in the same node pass the same link if it is shared.
    slowness: float
    tree_slowness: float  # seconds per byte of a tree, there and back

    def scatter_s(self, nbytes: float) -> float:
        """A reduce-scatter of `nbytes` per device, or the all-gather that undoes it."""
        return LAUNCH_S + self._around_s(nbytes) if self.size > 1 else 0.0

    def reduce_s(self, nbytes: float) -> float:
        """An all-reduce of `nbytes` per device."""
        if self.size <= 1:
            return 0.0
        along_trees_s = self.tree_s + nbytes * self.tree_slowness
        return LAUNCH_S + min(2 * self._around_s(nbytes), along_trees_s)

    def _around_s(self, nbytes: float) -> float:
        return self.ring_s + (self.size - 1) / self.size * nbytes * self.slowness


@functools.lru_cache(maxsize=1024)  # bucketing asks for the same few rings 100,000 times
def _ring(topology: Topology, names: tuple[str, ...]) -> _Ring:
    axes = [axis for axis in map(topology.axis, names) if axis.size > 1]
    ring_s = tree_s = slowness = tree_slowness = 0.0
    nodes = 1  # of the levels so far
    for axis in axes:
        # rings that leave one node of a shared level at the same time
        inner_axes = topology.inside(axis.name)
        rings = math.prod(inner.size for inner in inner_axes if inner.name not in names)
        axis_slowness = (rings if axis.shared else 1) / axis.bandwidth
        slowness = max(slowness, axis_slowness)
        ways = 1 if nodes == 1 and axis.size == 2 else 2
        tree_slowness = max(tree_slowness, ways * axis_slowness / _TREE_EFFICIENCY)
        ring_s += nodes * (axis.size - 1) * axis.latency_s  # the steps that cross this level
        tree_s += 2 * (axis.size - 1).bit_length() * axis.latency_s
        nodes *= axis.size
    return _Ring(nodes, ring_s, tree_s, slowness, tree_slowness)


def all_reduce_seconds(topology: Topology, axes: tuple[str, ...], nbytes: float) -> float:
    """Seconds of one all-reduce of `nbytes` per device over a group of axes."""
    return _ring(topology, axes).reduce_s(nbytes)


def reduce_scatter_seconds(topology: Topology, axes: tuple[str, ...], nbytes: float) -> float:
    """Seconds of one reduce-scatter of `nbytes` per device.

    The all-gather that undoes it takes as long.
    """
    return _ring(topology, axes).scatter_s(nbytes)
