"""Collectives of a compiled program: the axes of the mesh that they cross, and their seconds on its links."""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memplan.errors import UnsupportedProgramError
from memplan.hardware.collectives import Decomposition, Phase, all_reduce_seconds, reduce_scatter_seconds
from memplan.hardware.topology import Topology

_LISTED = re.compile(r"replica_groups=\{(?:\{(?P<first>[\d,]*)\}|\})")
_COUNTED = re.compile(
    r"replica_groups=\[(?P<groups>\d+),(?P<size>\d+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)
_MESHED = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]+)\]"
    r"(?:, device_ids=\((?:\[(?P<dims>[\d,]+)\]T\((?P<order>[\d,]+)\)|(?P<ids>[\d,]+))\))? \{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+)|:\((?P<before>\d+)\)(?P<part>\d+))?")


@functools.lru_cache(maxsize=256)
def first_group(attributes: str) -> tuple[int, ...]:
    """Devices of the first replica group, in any of HLO's notations; none if one group has all.

    Raises:
      UnsupportedProgramError: another notation.
    """
    if listed := _LISTED.search(attributes):
        return tuple(map(int, filter(None, (listed["first"] or "").split(","))))
    if counted := _COUNTED.search(attributes):
        return tuple(itertools.islice(_counted(counted["dims"], counted["order"]), int(counted["size"])))
    if meshed := _MESHED.search(attributes):
        return _along_axes(meshed)
    if "replica_groups=" in attributes:
        raise UnsupportedProgramError(
            f"memplan does not understand the device groups of a collective: {attributes[:200]}. Use a version of jax "
            "that memplan supports."
        )
    return ()


def _counted(dims: str, order: str | None) -> Iterator[int]:
    """Devices 0, 1, ... reshaped to these dimensions, and read with the dimensions in another order."""
    sizes = _numbers(dims)
    strides = _strides(sizes)
    turned = _numbers(order) if order else range(len(sizes))
    for place in itertools.product(*(range(sizes[dim]) for dim in turned)):
        yield sum(at * strides[dim] for at, dim in zip(place, turned, strict=True))


def _along_axes(meshed: re.Match[str]) -> tuple[int, ...]:
    """Devices of the mesh at index 0 of all axes but the named ones; a name like `'a':(2)4` is a part of an axis."""
    sizes = {axis["name"]: int(axis["size"]) for axis in _AXIS.finditer(meshed["mesh"])}
    strides = dict(zip(sizes, _strides(tuple(sizes.values())), strict=True))
    runs: list[range] = []
    for axis in _AXIS.finditer(meshed["axes"]):
        size, stride = sizes[axis["name"]], strides[axis["name"]]
        if axis["part"]:
            stride *= size // (int(axis["before"]) * int(axis["part"]))
            size = int(axis["part"])
        runs.append(range(0, size * stride, stride))
    places = map(sum, itertools.product(*runs))
    if meshed["ids"]:
        devices: Sequence[int] = _numbers(meshed["ids"])
    elif meshed["dims"]:
        devices = tuple(_counted(meshed["dims"], meshed["order"]))
    else:
        devices = range(math.prod(sizes.values()))
    return tuple(devices[place] for place in places)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


REDUCE, SCATTER, GATHER, EXCHANGE = "all-reduce", "reduce-scatter", "all-gather", "all-to-all"
COLLECTIVES = (REDUCE, SCATTER, GATHER, EXCHANGE)


@dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str  # HLO's opcode
    axes: tuple[str, ...]  # axes of the mesh, outermost first
    nbytes: int  # bytes of the whole on one device: the input of a reduce-scatter, the output of an all-gather

    def __str__(self) -> str:
        return f"{self.kind}({','.join(self.axes)})"


@dataclass(frozen=True)
class Interconnect:
    """The links that a program's collectives use."""

    compiled_for: Topology  # sizes of the axes in the program; links: those of the replay
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
        """Seconds on idle links."""
        if not collective.axes:
            return 0.0
        alone = Decomposition((Phase(collective.axes, False),))
        take = (
            all_reduce_seconds if collective.kind == REDUCE else reduce_scatter_seconds
        )  # the others send the same amount
        return take(self.links, alone, collective.nbytes)

    def _place(self, device: int) -> tuple[int, ...]:
        found: list[int] = []
        for axis in reversed(self.compiled_for.axes):
            device, at = divmod(device, axis.size)
            found.append(at)
        return tuple(reversed(found))
