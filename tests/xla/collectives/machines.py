"""Machines whose outer links are so slow that phases pay for a single byte, and groups on them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from memplan.hardware.machine import Groups, Machine
from memplan.hardware.topology import Axis, Topology
from memplan.xla.collectives.cost import Collective, collective, is_collective
from memplan.xla.module import Module


def slow_outside(*sizes: int, devices: Sequence[int] = (), bandwidth: float = 1.0) -> Machine:
    """A machine of levels of these sizes, each a thousand times as fast as the one around it; no latencies."""
    axes = [
        Axis(f"level{at}", size, 0.0, bandwidth * 1000.0**at, shared=at < len(sizes) - 1)
        for at, size in enumerate(sizes)
    ]
    count = int(np.prod(sizes))
    return Machine(
        Topology("slow", "for tests", tuple(axes), ()), tuple(devices) or tuple(range(count))
    )


def groups_along(machine: Machine, levels: Sequence[int]) -> Groups:
    """Groups of all partitions that differ at these levels alone; the first level is the slowest in a group's order."""
    sizes = [axis.size for axis in machine.topology.axes]
    partitions = np.argsort(np.array(machine.devices)).reshape(sizes)
    fixed_levels = [level for level in range(len(sizes)) if level not in levels]
    count = int(np.prod([sizes[level] for level in levels], dtype=int))
    rows = partitions.transpose(*fixed_levels, *levels).reshape(-1, count)
    return tuple(tuple(int(partition) for partition in row) for row in rows)


def collectives(module: Module, machine: Machine) -> list[Collective]:
    """What the collectives of the entry take, in their order."""
    body = module.entry
    return [
        collective(machine, op, sum(body.ops[name].nbytes for name in op.operands))
        for op in body.ops.values()
        if is_collective(op.opcode)
    ]


@dataclass(frozen=True)
class Case:
    """A machine, groups on it, and an array that is cut along a dimension."""

    machine: Machine
    levels: tuple[int, ...]  # of the groups
    piece: tuple[int, ...]
    dim: int

    @property
    def groups(self) -> Groups:
        return groups_along(self.machine, self.levels)

    @property
    def whole(self) -> tuple[int, ...]:
        count = len(self.groups[0])
        return tuple(side * (count if at == self.dim else 1) for at, side in enumerate(self.piece))

    @property
    def reaches_levels(self) -> bool:
        sizes = [axis.size for axis in self.machine.topology.axes]
        return sum(sizes[level] > 1 for level in self.levels) > 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.sampled_from([(2, 4), (3, 2), (2, 2, 2), (2, 3, 2), (4, 1, 3), (1, 6)]))
    devices = draw(st.one_of(st.just(()), st.permutations(range(int(np.prod(sizes))))))
    levels = draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, len(sizes)))]
    piece = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    machine = slow_outside(*sizes, devices=devices)
    return Case(machine, tuple(levels), tuple(piece), draw(st.integers(0, len(piece) - 1)))
