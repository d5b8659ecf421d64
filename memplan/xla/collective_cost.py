"""Collectives of a compiled program: over which axes of the mesh they go, and what they take on its links."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.hardware.collectives import Decomposition, Phase, all_reduce_seconds, reduce_scatter_seconds
from memplan.hardware.topology import Topology
from memplan.xla.replica_groups import first_group

REDUCE, SCATTER, GATHER, EXCHANGE = "all-reduce", "reduce-scatter", "all-gather", "all-to-all"
COLLECTIVES = (REDUCE, SCATTER, GATHER, EXCHANGE)


@dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str  # HLO's opcode
    axes: tuple[str, ...]  # of the mesh, outermost first
    nbytes: int  # on one device, of the whole: what goes into a reduce-scatter, what comes out of an all-gather

    def __str__(self) -> str:
        return f"{self.kind}({','.join(self.axes)})"


@dataclass(frozen=True)
class Interconnect:
    """The links that a program's collectives go over."""

    compiled_for: Topology  # sizes of the axes in the program; links: those that it is replayed on
    links: Topology

    def collective(self, opcode: str, attributes: str, operand_nbytes: int, result_nbytes: int) -> Collective:
        kind = next(kind for kind in COLLECTIVES if opcode.startswith(kind))
        return Collective(kind, self.axes(attributes), max(operand_nbytes, result_nbytes))

    def axes(self, attributes: str) -> tuple[str, ...]:
        """The axes along which the devices of one replica group differ; without groups, all."""
        names = tuple(self.compiled_for.sizes)
        group = first_group(attributes)
        if not group:
            return tuple(axis.name for axis in self.compiled_for.axes if axis.size > 1)
        places = [self._place(device) for device in group]
        return tuple(name for dim, name in enumerate(names) if len({place[dim] for place in places}) > 1)

    def seconds(self, collective: Collective) -> float:
        """On idle links."""
        if not collective.axes:
            return 0.0
        alone = Decomposition((Phase(collective.axes, False),))
        take = all_reduce_seconds if collective.kind == REDUCE else reduce_scatter_seconds  # the others send as much
        return take(self.links, alone, collective.nbytes)

    def _place(self, device: int) -> tuple[int, ...]:
        found: list[int] = []
        for axis in reversed(self.compiled_for.axes):
            device, at = divmod(device, axis.size)
            found.append(at)
        return tuple(reversed(found))
