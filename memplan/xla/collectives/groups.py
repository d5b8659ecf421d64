"""Replica groups in HLO's notations."""

import functools
import math
import re
from collections.abc import Sequence

from memplan.errors import UnsupportedProgramError
from memplan.hardware.machine import Groups, numbers_at, strides_of

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(?P<size>\d+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESHED = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]+)\]"
    r"(?:, device_ids=\((?:\[(?P<dims>[\d,]+)\]T\((?P<order>[\d,]+)\)|(?P<ids>[\d,]+))\))? \{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+)|:\((?P<before>\d+)\)(?P<part>\d+))?")
DIMENSION = re.compile(r"\bdimensions=\{(\d+)\}")
"""The dimension that is gathered or scattered."""
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
        ids, size = _turned(counted["dims"], counted["order"]), int(counted["size"])
        groups = tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))
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


def _turned(dims: str, order: str | None) -> list[int]:
    """Partitions 0, 1, ... reshaped to these dimensions, and read with the dimensions in another order."""
    sizes = _ints(dims)
    strides = strides_of(sizes)
    turned = _ints(order) if order else range(len(sizes))
    return numbers_at([sizes[dim] for dim in turned], [strides[dim] for dim in turned])


def _along_axes(meshed: re.Match[str]) -> Groups:
    """Partitions that differ along the named axes of a mesh alone; a name like `'a':(2)4` is a part of an axis."""
    sizes = {axis["name"]: int(axis["size"]) for axis in _AXIS.finditer(meshed["mesh"])}
    strides = dict(zip(sizes, strides_of(tuple(sizes.values())), strict=True))
    runs: list[tuple[int, int]] = []  # size and stride
    for axis in _AXIS.finditer(meshed["axes"]):
        size, stride = sizes[axis["name"]], strides[axis["name"]]
        if axis["part"]:
            stride *= size // (int(axis["before"]) * int(axis["part"]))
            size = int(axis["part"])
        runs.append((size, stride))
    group = numbers_at(*zip(*runs, strict=True)) if runs else [0]
    count = math.prod(sizes.values())
    if meshed["ids"]:
        ids: Sequence[int] = _ints(meshed["ids"])
    elif meshed["dims"]:
        ids = _turned(meshed["dims"], meshed["order"])
    else:
        ids = range(count)
    groups, seen = [], set[int]()
    for start in range(count):
        if start not in seen:
            members = [start + offset for offset in group]
            seen.update(members)
            groups.append(tuple(ids[one] for one in members))
    return tuple(groups)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
