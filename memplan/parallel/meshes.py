"""Meshes with one axis per level of the machine, and the links that go with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from memplan.errors import MeshError
from memplan.hardware.topology import Topology, topology_named


def mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """All devices of all processes, or the first ones, as a mesh.

    Args:
      sizes: axis -> size, outermost first; by default the processes (`host`) and the devices of each (`device`).

    Raises:
      MeshError: larger than what is there, or processes with unequal numbers of devices.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if sizes is None:
        counts = {p: sum(d.process_index == p for d in devices) for p in range(jax.process_count())}
        if len(set(counts.values())) > 1:
            raise MeshError(
                f"the processes have unequal numbers of devices ({counts}): no mesh of hosts and devices holds all. "
                "Start them alike, or name the sizes of a mesh."
            )
        sizes = {"host": len(counts), "device": len(devices) // len(counts)}
    wanted = math.prod(sizes.values())
    if wanted > len(devices) or min(sizes.values(), default=1) < 1:
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise MeshError(
            f"a mesh of {shape} needs {wanted} devices; there are {len(devices)} in {jax.process_count()} processes. "
            "Take a smaller mesh, or start more processes (memplan launch -n)."
        )
    return Mesh(np.array(devices[:wanted]).reshape(tuple(sizes.values())), tuple(sizes))


def links_of(mesh: Mesh | AbstractMesh) -> Topology:
    """What is assumed of a mesh's links where nobody has said: shared memory between CPUs, today's preset for GPUs."""
    preset = topology_named("local" if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu" else "today")
    inner, outer = preset.axes[-1], preset.axes[0]
    names = list(mesh.shape)
    axes = [replace(inner if name == names[-1] else outer, name=name, size=size) for name, size in mesh.shape.items()]
    return replace(preset, axes=tuple(axes))


def topology_for(topology: Topology | str | None, mesh: Mesh | AbstractMesh) -> Topology:
    """The topology with the mesh's axes.

    Raises:
      MeshError: they are others.
    """
    if topology is None:
        return links_of(mesh)
    known = topology_named(topology) if isinstance(topology, str) else topology
    if list(known.sizes) != list(mesh.shape):
        raise MeshError(
            f"the topology {known.name!r} has the axes {', '.join(known.sizes)}; the mesh has {', '.join(mesh.shape)}. "
            "Name the mesh's axes as the topology does, outermost first."
        )
    return known.resized(dict(mesh.shape))


def untyped(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh for arrays whose types do not say how they lie on it; jax makes meshes whose arrays' types do."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def is_typed(leaf: Any) -> bool:
    """Whether the type of an array says how it lies on a mesh."""
    return AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types
