"""Which devices take part in a collective of a compiled program together, in the notations that HLO has."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from memplan.errors import UnsupportedProgramError

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
    """Devices of the first replica group, in any of HLO's notations; none where there is but one group of all.

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
            f"the compiler writes the devices of a collective in a way that is not known here: {attributes[:200]}. "
            "Try a version of jax that memplan is tested with."
        )
    return ()


def _counted(dims: str, order: str | None) -> Iterator[int]:
    """Devices 0, 1, ... laid out in these dimensions, read with the dimensions in another order."""
    sizes = _numbers(dims)
    strides = _strides(sizes)
    turned = _numbers(order) if order else range(len(sizes))
    for place in itertools.product(*(range(sizes[dim]) for dim in turned)):
        yield sum(at * strides[dim] for at, dim in zip(place, turned, strict=True))


def _along_axes(meshed: re.Match[str]) -> tuple[int, ...]:
    """Devices of the mesh at the beginning of all axes but those named; of one named `'a':(2)4`, a part alone."""
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
