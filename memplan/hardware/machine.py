"""A program's partitions on a machine: their hosts, and the links that a group of them has."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from memplan.errors import TopologyError
from memplan.hardware.topology import Topology

_MAX_PER_HOST = 8  # devices: as the servers of today have
Groups = tuple[tuple[int, ...], ...]
"""Partitions that take part in one collective together, group by group."""


@dataclass(frozen=True)
class Grid:
    """Groups that have as many partitions in every node that they reach, at each level.

    Attributes:
      sizes: nodes of each level in one node of the level around it, outermost first, as far as one
        group reaches.
      rows: the groups, the partitions of each in the machine's order, host by host.
    """

    sizes: tuple[int, ...]
    rows: Groups

    def in_order(self, levels: Sequence[int]) -> Groups:
        """The groups, with partitions ordered by these coordinates, the last varying fastest."""
        strides = strides_of(self.sizes)
        sizes = [self.sizes[level] for level in levels]
        order = numbers_at(sizes, [strides[level] for level in levels])
        return tuple(tuple(row[number] for number in order) for row in self.rows)

    def along(self, levels: Collection[int]) -> Groups:
        """Groups of partitions that differ in these coordinates alone, in the machine's order."""
        strides = strides_of(self.sizes)
        inside = [size if level in levels else 1 for level, size in enumerate(self.sizes)]
        outside = [1 if level in levels else size for level, size in enumerate(self.sizes)]
        offsets = numbers_at(inside, strides)
        groups = []
        for row in self.rows:
            for start in numbers_at(outside, strides):
                groups.append(tuple(row[start + offset] for offset in offsets))
        return tuple(groups)


@dataclass(frozen=True)
class Machine:
    """A topology, and the partition of a program that each of its devices runs.

    Attributes:
      devices: for each partition, its device, counted from 0 through the topology, host by host.
      assumed: what of the topology nobody described, such as "hosts and links"; "" if nothing.

    Raises:
      TopologyError: the topology has another number of devices.
    """

    topology: Topology
    devices: tuple[int, ...]
    assumed: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        count = len(self.devices)
        if sorted(self.devices) != list(range(self.topology.devices)):
            raise TopologyError(
                f"the topology {self.topology.name!r} has {self.topology.devices} devices; the "
                f"program runs on {count}. "
                f"Give it as many, such as '{count // per_host(count)}x{per_host(count)}'."
            )

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """For each partition, the number of its node at every level, outermost first.

        Nodes are numbered within the node around them.
        """
        sizes = [axis.size for axis in self.topology.axes]
        levels = list(zip(strides_of(sizes), sizes, strict=True))
        rows = ([device // stride % size for stride, size in levels] for device in self.devices)
        return tuple(map(tuple, rows))

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """For each partition, the node around it at the level before the innermost."""
        return tuple(coordinates[:-1] for coordinates in self.coordinates)

    @property
    def is_one_host(self) -> bool:
        return len(set(self.hosts())) == 1

    def grid(self, groups: Groups) -> Grid | None:
        """The grid of the groups.

        None if a group reaches nodes unevenly, or if two groups have different sizes.
        """
        rows = tuple(tuple(sorted(group, key=self.coordinates.__getitem__)) for group in groups)
        coordinates = self.coordinates
        sizes = {self._even_sizes([coordinates[partition] for partition in row]) for row in rows}
        if len(sizes) != 1 or None in sizes:
            return None
        (common,) = sizes
        assert common is not None
        return Grid(common, rows)

    def _even_sizes(self, coordinates: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Sizes of the levels that these coordinates span.

        None if their nodes hold unequal numbers.
        """
        sizes = []
        outer_nodes = 1
        for level in range(1, len(self.topology.axes) + 1):
            counts = Counter(node[:level] for node in coordinates)
            if len(set(counts.values())) != 1 or len(counts) % outer_nodes:
                return None
            sizes.append(len(counts) // outer_nodes)
            outer_nodes = len(counts)
        return tuple(sizes)

    def links(self, groups: Groups) -> Topology:
        """The links that one of the groups has for itself while all of them communicate.

        Its axes have the sizes of the group. A link that several groups share gives each its part.
        If groups reach nodes unevenly, the largest numbers count.
        """
        axes = []
        for level, axis in enumerate(self.topology.axes):
            size = max(self._children(group, level) for group in groups)
            sharing = 1
            if axis.shared:
                sharing = max(self._groups_leaving(groups, level).values(), default=1)
            axes.append(replace(axis, size=size, bandwidth=axis.bandwidth / sharing))
        return replace(self.topology, axes=tuple(axes))

    def _children(self, group: Sequence[int], level: int) -> int:
        """Most children of one parent node that a group spans."""
        nodes = {self.coordinates[partition][: level + 1] for partition in group}
        return max(Counter(node[:-1] for node in nodes).values())

    def _groups_leaving(self, groups: Groups, level: int) -> Counter[tuple[int, ...]]:
        """For each node of a level: the groups that reach it and other nodes of its parent."""
        counts: Counter[tuple[int, ...]] = Counter()
        for group in groups:
            children: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
            for partition in group:
                node = self.coordinates[partition][: level + 1]
                children[node[:-1]].add(node)
            for nodes in children.values():
                if len(nodes) > 1:
                    counts.update(nodes)
        return counts


def per_host(devices: int) -> int:
    """Devices of each host, if the number of hosts is not known."""
    sizes = range(min(_MAX_PER_HOST, devices), 0, -1)
    return next(size for size in sizes if devices % size == 0)


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Distances of neighbours along each dimension, the last varying fastest."""
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def numbers_at(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The numbers of all coordinates of these sizes and strides, the last varying fastest."""
    numbers = [0]
    for size, stride in zip(sizes, strides, strict=True):
        numbers = [number + index * stride for number in numbers for index in range(size)]
    return numbers
