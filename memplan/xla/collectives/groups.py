"""Replica groups in HLO's notations."""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from memplan.errors import UnsupportedProgramError
from memplan.hardware.machine import Groups

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(?P<size>\d+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESHED = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]+)\]"
    r"(?:, device_ids=\((?:\[(?P<dims>[\d,]+)\]T\((?P<order>[\d,]+)\)|(?P<ids>[\d,]+))\))? \{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+)|:\((?P<before>\d+)\)(?P<part>\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@functools.lru_cache(maxsize=1024)
def replica_groups(attributes: str, partitions: int) -> Groups:
    """All replica groups of a collective; without any in its attributes, one of all partitions.

    Raises:
      UnsupportedProgramError: a notation that memplan does not know.
    """
    if listed := _LISTED.search(attributes):
        groups = tuple(_ints(one) for one in re.findall(r"\{([\d,]+)\}", listed[1]))
    elif counted := _COUNTED.search(attributes):
        groups = _cut(tuple(_turned(counted["dims"], counted["order"])), int(counted["size"]))
    elif meshed := _MESHED.search(attributes):
        groups = _along_axes(meshed)
    elif "replica_groups=" in attributes:
        raise UnsupportedProgramError(
            f"memplan does not understand the device groups of a collective: {attributes[:200]}. Use a version of jax "
            "that memplan supports."
        )
    else:
        groups = ()
    return groups or (tuple(range(partitions)),)


def source_target_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """Of a collective-permute: who sends, and to whom."""
    found = _PAIRS.search(attributes)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1])) if found else ()


def written(groups: Groups) -> str:
    """The groups as HLO lists them."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def _cut(ids: Sequence[int], size: int) -> Groups:
    return tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))


def _turned(dims: str, order: str | None) -> Iterator[int]:
    """Partitions 0, 1, ... reshaped to these dimensions, and read with the dimensions in another order."""
    sizes = _ints(dims)
    strides = _strides(sizes)
    turned = _ints(order) if order else range(len(sizes))
    for place in itertools.product(*(range(sizes[dim]) for dim in turned)):
        yield sum(at * strides[dim] for at, dim in zip(place, turned, strict=True))


def _along_axes(meshed: re.Match[str]) -> Groups:
    """Partitions that differ along the named axes of a mesh alone; a name like `'a':(2)4` is a part of an axis."""
    sizes = {axis["name"]: int(axis["size"]) for axis in _AXIS.finditer(meshed["mesh"])}
    strides = dict(zip(sizes, _strides(tuple(sizes.values())), strict=True))
    runs: list[range] = []
    for axis in _AXIS.finditer(meshed["axes"]):
        size, stride = sizes[axis["name"]], strides[axis["name"]]
        if axis["part"]:
            stride *= size // (int(axis["before"]) * int(axis["part"]))
            size = int(axis["part"])
        runs.append(range(0, size * stride, stride))
    group = [sum(place) for place in itertools.product(*runs)]
    count = math.prod(sizes.values())
    if meshed["ids"]:
        ids: Sequence[int] = _ints(meshed["ids"])
    elif meshed["dims"]:
        ids = tuple(_turned(meshed["dims"], meshed["order"]))
    else:
        ids = range(count)
    groups, seen = [], set[int]()
    for start in range(count):
        if start not in seen:
            members = [start + offset for offset in group]
            seen.update(members)
            groups.append(tuple(ids[one] for one in members))
    return tuple(groups)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
