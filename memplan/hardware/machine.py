"""A program's partitions on a machine: which of them stand on one host, and the links that a group of them has."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.errors import TopologyError
from memplan.hardware.topology import Topology

_MOST_PER_HOST = 8  # devices: as the servers of today have
Groups = tuple[tuple[int, ...], ...]  # partitions that take part in one collective together, group by group


@dataclass(frozen=True)
class Grid:
    """Groups that have as many partitions in every node that they reach, at each level of the machine.

    Attributes:
      sizes: nodes of each level in one node of the level around it, outermost first, as far as one group reaches.
      rows: the groups, the partitions of each in the machine's order, host by host.
    """

    sizes: tuple[int, ...]
    rows: Groups

    def in_order(self, levels: Sequence[int]) -> Groups:
        """The groups with partitions in the order of their places at these levels, the last varying fastest."""
        strides = strides_of(self.sizes)
        order = numbers_at([self.sizes[level] for level in levels], [strides[level] for level in levels])
        return tuple(tuple(row[number] for number in order) for row in self.rows)

    def along(self, levels: Collection[int]) -> Groups:
        """Groups of the partitions that differ in their places at these levels alone, in the machine's order."""
        strides = strides_of(self.sizes)
        inside = [size if level in levels else 1 for level, size in enumerate(self.sizes)]
        starts = [1 if level in levels else size for level, size in enumerate(self.sizes)]
        begins, offsets = numbers_at(starts, strides), numbers_at(inside, strides)
        return tuple(tuple(row[start + offset] for offset in offsets) for row in self.rows for start in begins)


@dataclass(frozen=True)
class Machine:
    """A topology, and which of its devices runs which partition of a program.

    Attributes:
      devices: for each partition, its device, counted from 0 through the topology, host by host.

    Raises:
      TopologyError: the topology has another number of devices.
    """

    topology: Topology
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.devices)
        if sorted(self.devices) != list(range(self.topology.devices)):
            raise TopologyError(
                f"the topology {self.topology.name!r} has {self.topology.devices} devices; the program runs on "
                f"{count}. Give it as many, such as '{count // per_host(count)}x{per_host(count)}'."
            )

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """For each partition, the number of its node at every level within the node around it, outermost first."""
        sizes = [axis.size for axis in self.topology.axes]
        levels = list(zip(strides_of(sizes), sizes, strict=True))
        return tuple(tuple(device // stride % size for stride, size in levels) for device in self.devices)

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """For each partition, the node around it at the level before the innermost."""
        return tuple(place[:-1] for place in self.places)

    @property
    def is_one_host(self) -> bool:
        return len(set(self.hosts())) == 1

    def grid(self, groups: Groups) -> Grid | None:
        """The grid of the groups; None where one reaches nodes unevenly, or two have other sizes."""
        rows = tuple(tuple(sorted(group, key=self.places.__getitem__)) for group in groups)
        sizes = {self._even_sizes([self.places[one] for one in row]) for row in rows}
        if len(sizes) != 1 or None in sizes:
            return None
        (found,) = sizes
        assert found is not None
        return Grid(found, rows)

    def _even_sizes(self, places: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Sizes of the levels that these places make; None where their nodes hold unequal numbers."""
        found, before = [], 1
        for level in range(1, len(self.topology.axes) + 1):
            inside = Counter(place[:level] for place in places)
            if len(set(inside.values())) != 1 or len(inside) % before:
                return None
            found.append(len(inside) // before)
            before = len(inside)
        return tuple(found)

    def links(self, groups: Groups) -> Topology:
        """The links that one of the groups has for itself while all of them communicate.

        Its axes have the sizes of the group, and of a link that several groups share each has its part. Of groups that
        reach nodes unevenly the largest numbers count.
        """
        axes = []
        for level, axis in enumerate(self.topology.axes):
            size = max(self._nodes(group, level) for group in groups)
            beside = max(self._leaving(groups, level).values(), default=1) if axis.shared else 1
            axes.append(replace(axis, size=size, bandwidth=axis.bandwidth / beside))
        return replace(self.topology, axes=tuple(axes))

    def _nodes(self, group: Sequence[int], level: int) -> int:
        """The most nodes of a level that a group reaches in one node of the level around it."""
        nodes = {self.places[one][: level + 1] for one in group}
        return max(Counter(node[:-1] for node in nodes).values())

    def _leaving(self, groups: Groups, level: int) -> Counter[tuple[int, ...]]:
        """For each node of a level: the groups that reach it and others in the same node of the level around it."""
        found: Counter[tuple[int, ...]] = Counter()
        for group in groups:
            around: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
            for one in group:
                node = self.places[one][: level + 1]
                around[node[:-1]].add(node)
            for nodes in around.values():
                if len(nodes) > 1:
                    found.update(nodes)
        return found


def per_host(devices: int) -> int:
    """Devices of each host, where nobody says how many hosts there are."""
    return next(size for size in range(min(_MOST_PER_HOST, devices), 0, -1) if devices % size == 0)


def strides_of(sizes: Sequence[int]) -> list[int]:
    """How far apart neighbours along each dimension are, the last varying fastest."""
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def numbers_at(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The numbers of all places in these sizes, which are so far apart, the last varying fastest."""
    found = [0]
    for size, stride in zip(sizes, strides, strict=True):
        found = [number + at * stride for number in found for at in range(size)]
    return found
