"""Replica groups in the notations of XLA's messages."""

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from memplan.errors import UnsupportedProgramError
from memplan.hardware.machine import Groups, numbers_at, strides_of


def replica_groups(message: Any) -> Groups:
    """All replica groups of a collective's message; () if it names none.

    Raises:
      UnsupportedProgramError: a notation that memplan does not know.
    """
    devices = message.collective_device_list
    mesh = message.mesh_axes_replica_group_list.mesh
    if any(len(UnknownFieldSet(part)) for part in (devices, mesh)):
        raise UnsupportedProgramError(
            f"memplan does not understand the device groups of the collective {message.name}. "
            "Use a version of jax that memplan supports."
        )
    if listed := devices.replica_groups or message.replica_groups:
        return tuple(tuple(group.replica_ids) for group in listed if group.replica_ids)
    if devices.HasField("iota_replica_group_list"):
        return _counted(devices.iota_replica_group_list)
    if message.HasField("iota_collective_device_list"):
        return _counted(message.iota_collective_device_list)
    if message.HasField("mesh_axes_replica_group_list"):
        return _along_axes(message.mesh_axes_replica_group_list)
    return ()


def _counted(iota: Any) -> Groups:
    """Partitions 0, 1, ... as an array of some dimensions, transposed and cut into groups."""
    ids = _transposed(iota.iota_reshape_dims, iota.iota_transpose_perm)
    size = iota.num_devices_per_group
    return tuple(tuple(ids[begin : begin + size]) for begin in range(0, len(ids), size))


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Partitions 0, 1, ... as an array of these dimensions, flattened in another order."""
    strides = strides_of(dims)
    order = order or range(len(dims))
    return numbers_at([dims[dim] for dim in order], [strides[dim] for dim in order])


def _along_axes(meshed: Any) -> Groups:
    """Groups of the partitions that differ along some axes of a mesh alone, or along parts of
    them.
    """
    sizes = [axis.size for axis in meshed.mesh.axes]
    strides = strides_of(sizes)
    runs: list[tuple[int, int]] = []  # size and stride
    for axis in meshed.axes:
        size, stride = sizes[axis.mesh_axis_index], strides[axis.mesh_axis_index]
        if axis.HasField("sub_axis_info"):
            part = axis.sub_axis_info
            stride *= size // (part.pre_size * part.size)
            size = part.size
        runs.append((size, stride))
    offsets = numbers_at(*zip(*runs, strict=True)) if runs else [0]
    ids: Sequence[int] = meshed.mesh.device_ids or range(math.prod(sizes))
    if meshed.mesh.HasField("iota_transform"):
        transform = meshed.mesh.iota_transform
        ids = _transposed(transform.reshape_dims, transform.transpose_perm)
    groups: list[tuple[int, ...]] = []
    grouped: set[int] = set()
    for start in range(len(ids)):
        if start not in grouped:
            members = [start + offset for offset in offsets]
            grouped.update(members)
            groups.append(tuple(ids[member] for member in members))
    return tuple(groups)
