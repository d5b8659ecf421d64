"""Collectives of a compiled program: over which axes of the mesh they go, and what they take on its links."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass

from memplan.planning.collectives import (
    Decomposition,
    Phase,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)
from memplan.planning.topology import Topology

_LISTED = re.compile(r"replica_groups=\{\{(?P<first>[\d,]*)\}")
_COUNTED = re.compile(
    r"replica_groups=\[(?P<groups>\d+),(?P<size>\d+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)

REDUCE, SCATTER, GATHER, EXCHANGE = "all-reduce", "reduce-scatter", "all-gather", "all-to-all"
COLLECTIVES = (REDUCE, SCATTER, GATHER, EXCHANGE)


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: HLO's opcode.
      axes: of the mesh, outermost first.
      nbytes: on one device, of the whole: what goes into a reduce-scatter, what comes out of an all-gather.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind}({','.join(self.axes)})"


@dataclass(frozen=True)
class Network:
    """The links that a program's collectives go over.

    Attributes:
      compiled_for: sizes of the axes in the program; links: those that it is replayed on.
    """

    compiled_for: Topology
    links: Topology

    def collective(self, opcode: str, attributes: str, operand_nbytes: int, result_nbytes: int) -> Collective:
        kind = next(kind for kind in COLLECTIVES if opcode.startswith(kind))
        return Collective(kind, self.axes(attributes), max(operand_nbytes, result_nbytes))

    def axes(self, attributes: str) -> tuple[str, ...]:
        """The axes along which the devices of one replica group differ; without groups, all."""
        names = tuple(self.compiled_for.sizes)
        group = _first_group(attributes)
        if not group:
            return tuple(axis.name for axis in self.compiled_for.axes if axis.size > 1)
        places = [self._place(device) for device in group]
        return tuple(name for dim, name in enumerate(names) if len({place[dim] for place in places}) > 1)

    def seconds(self, collective: Collective) -> float:
        """On idle links."""
        if not collective.axes:
            return 0.0
        alone = Decomposition((Phase(collective.axes, False),))
        match collective.kind:
            case "all-reduce":
                return all_reduce_seconds(self.links, alone, collective.nbytes)
            case "all-gather":
                return all_gather_seconds(self.links, alone, collective.nbytes)
        return reduce_scatter_seconds(self.links, alone, collective.nbytes)  # an all-to-all sends as many bytes

    def _place(self, device: int) -> tuple[int, ...]:
        found: list[int] = []
        for axis in reversed(self.compiled_for.axes):
            device, at = divmod(device, axis.size)
            found.append(at)
        return tuple(reversed(found))


@functools.lru_cache(maxsize=256)
def _first_group(attributes: str) -> tuple[int, ...]:
    """Devices of the first replica group, in either of HLO's two notations."""
    if listed := _LISTED.search(attributes):
        return tuple(map(int, filter(None, listed["first"].split(","))))
    counted = _COUNTED.search(attributes)
    if counted is None:
        return ()
    dims = _numbers(counted["dims"])
    order = _numbers(counted["order"]) if counted["order"] else tuple(range(len(dims)))
    strides = [1] * len(dims)
    for dim in range(len(dims) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * dims[dim + 1]
    turned = itertools.product(*(range(dims[dim]) for dim in order))
    devices = (sum(at * strides[dim] for at, dim in zip(place, order, strict=True)) for place in turned)
    return tuple(itertools.islice(devices, int(counted["size"])))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
