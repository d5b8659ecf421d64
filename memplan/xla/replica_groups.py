"""Replica groups in HLO's notations."""

import functools
import math
import re
from collections.abc import Sequence

from memplan.errors import UnsupportedProgramError
from memplan.hardware.machine import Groups, numbers_at, strides_of

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(
    r"replica_groups=\[\d+,(?P<size>\d+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?",
)
_MESHED = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]+)\]"
    r"(?:, device_ids=\((?:\[(?P<dims>[\d,]+)\]T\((?P<order>[\d,]+)\)|(?P<ids>[\d,]+))\))?"
    r" \{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+)|:\((?P<before>\d+)\)(?P<part>\d+))?")


@functools.lru_cache(maxsize=1024)
def replica_groups(attributes: str, partitions: int) -> Groups:
    """All replica groups of a collective; one of all partitions if its attributes name none.

    Raises:
      UnsupportedProgramError: a notation that memplan does not know.
    """
    if listed := _LISTED.search(attributes):
        groups = tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    elif counted := _COUNTED.search(attributes):
        ids = _transposed(counted["dims"], counted["order"])
        size = int(counted["size"])
        groups = tuple(tuple(ids[begin : begin + size]) for begin in range(0, len(ids), size))
    elif meshed := _MESHED.search(attributes):
        groups = _along_axes(meshed)
    elif "replica_groups=" in attributes:
        raise UnsupportedProgramError(
            "memplan does not understand the device groups of a collective: "
            f"{attributes[:200]}. Use a version of jax that memplan supports."
        )
    else:
        groups = ()
    return groups or (tuple(range(partitions)),)


def groups_text(groups: Groups) -> str:
    """The groups as HLO lists them."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def _transposed(dims: str, order: str | None) -> list[int]:
    """Partitions 0, 1, ... as an array of these dimensions, flattened in another order."""
    sizes = _ints(dims)
    strides = strides_of(sizes)
    dim_order = _ints(order) if order else range(len(sizes))
    return numbers_at([sizes[dim] for dim in dim_order], [strides[dim] for dim in dim_order])


def _along_axes(meshed: re.Match[str]) -> Groups:
    """Groups of the partitions that differ along the named axes of a mesh alone.

    A name like `'a':(2)4` is a part of an axis.
    """
    sizes = {axis["name"]: int(axis["size"]) for axis in _AXIS.finditer(meshed["mesh"])}
    strides = dict(zip(sizes, strides_of(tuple(sizes.values())), strict=True))
    runs: list[tuple[int, int]] = []  # size and stride
    for axis in _AXIS.finditer(meshed["axes"]):
        size = sizes[axis["name"]]
        stride = strides[axis["name"]]
        if axis["part"]:
            stride *= size // (int(axis["before"]) * int(axis["part"]))
            size = int(axis["part"])
        runs.append((size, stride))
    offsets = numbers_at(*zip(*runs, strict=True)) if runs else [0]
    count = math.prod(sizes.values())
    if meshed["ids"]:
        ids: Sequence[int] = _ints(meshed["ids"])
    elif meshed["dims"]:
        ids = _transposed(meshed["dims"], meshed["order"])
    else:
        ids = range(count)
    groups: list[tuple[int, ...]] = []
    grouped: set[int] = set()
    for start in range(count):
        if start not in grouped:
            members = [start + offset for offset in offsets]
            grouped.update(members)
            groups.append(tuple(ids[member] for member in members))
    return tuple(groups)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
