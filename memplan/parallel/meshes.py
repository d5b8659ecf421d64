"""Meshes with one axis per level of the machine, and their links: assumed from presets, or measured by all-reduces."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from memplan.errors import MeshError
from memplan.hardware.collectives import LAUNCH_S
from memplan.hardware.topology import Axis, Topology, topology_named

SMALL_BYTES, LARGE_BYTES = 1 << 12, 4 << 20
_RUNS = 5


def mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of all devices of all processes, or of the first ones.

    Args:
      sizes: axis -> size, outermost first; by default the processes (`host`) and the devices of each (`device`).

    Raises:
      MeshError: there are fewer devices, or processes have unequal numbers of them.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if sizes is None:
        counts = {p: sum(d.process_index == p for d in devices) for p in range(jax.process_count())}
        if len(set(counts.values())) > 1:
            raise MeshError(
                f"the processes have unequal numbers of devices ({counts}): no mesh of hosts and devices holds all. "
                "Start them with equal numbers, or give the sizes of a mesh."
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
    """The links that a mesh is assumed to have: shared memory between CPUs, the preset `today` between GPUs."""
    preset = topology_named("local" if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu" else "today")
    inner, outer = preset.axes[-1], preset.axes[0]
    names = list(mesh.shape)
    axes = [replace(inner if name == names[-1] else outer, name=name, size=size) for name, size in mesh.shape.items()]
    return replace(preset, axes=tuple(axes))


def topology_for(topology: Topology | str | None, mesh: Mesh | AbstractMesh) -> Topology:
    """The topology at the sizes of the mesh; by default the links that it is assumed to have.

    Raises:
      MeshError: the topology has other axes than the mesh.
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


def measure_topology(mesh: Mesh, name: str = "measured") -> Topology:
    """Latency and bandwidth of every axis, by timing a small and a large all-reduce; the same result in all processes.

    Every process of the mesh must call it. Groups of the other axes send at the same time, so the bandwidth of a link
    that they share comes out as that of the link. Best of five runs, minus the launch that the cost model counts.
    """
    axes = []
    for place, (axis, size) in enumerate(mesh.shape.items()):
        inner = int(np.prod(list(mesh.shape.values())[place + 1 :], dtype=int))
        shared = place < len(mesh.shape) - 1
        if size == 1:
            axes.append(Axis(axis, 1, 0.0, 1e12, shared))
            continue
        small, large = (_seconds(mesh, axis, nbytes) for nbytes in (SMALL_BYTES, LARGE_BYTES))
        if jax.process_count() > 1:  # what rank 0 measured
            small, large = map(float, multihost_utils.broadcast_one_to_all(np.asarray((small, large))))
        sent = 2 * (size - 1) / size * (LARGE_BYTES - SMALL_BYTES) * (inner if shared else 1)
        steps = 2 * (size - 1).bit_length()
        latency_s = max(0.0, small - LAUNCH_S) / steps
        axes.append(Axis(axis, size, latency_s, sent / max(large - small, 1e-9), shared))
    description = f"{mesh.devices.size} devices ({mesh.devices.flat[0].device_kind}) in {jax.process_count()} processes"
    source = (
        f"measured by memplan on jax {jax.__version__}: all-reduces of {SMALL_BYTES} and {LARGE_BYTES} bytes per axis"
    )
    return Topology(name, description, tuple(axes), (source,))


def _seconds(mesh: Mesh, axis: str, nbytes: int) -> float:
    """Seconds of an all-reduce of `nbytes` on every device over an axis; the fastest of several."""
    floats, own = nbytes // 4, NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    values = jax.make_array_from_callback(
        (mesh.devices.size * floats,), own, lambda index: np.zeros(floats, np.float32)
    )
    reduce = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.psum(part, axis), mesh=mesh, in_specs=own.spec, out_specs=own.spec, check_vma=False
        )
    )
    jax.block_until_ready(reduce(values))
    found = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(reduce(values))
        found.append(time.perf_counter() - start)
    return min(found)


def untyped(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with axes of type Auto; `jax.make_mesh` makes Explicit ones, which put shardings into types."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)


def is_typed(leaf: Any) -> bool:
    """Whether the type of an array has a sharding (explicit axes)."""
    return AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types
