"""Meshes, the machine that they stand on, and its links: assumed from presets, or measured by all-reduces."""

import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.errors import MeshError
from memplan.hardware.collectives import LAUNCH_S
from memplan.hardware.machine import Machine, per_host
from memplan.hardware.topology import Axis, Topology, topology_named
from memplan.program import compat

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


_SHAPE = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})*")


def machine_of(division: compat.Division, topology: Topology | str | None, described: bool) -> Machine:
    """The machine that a step's partitions run on.

    Args:
      topology: as for `memplan.jit`.
      described: devices that are absent take the place of those of the step, in the order of their numbers.

    Raises:
      TopologyError: it has another number of devices.
    """
    count, devices = division.count, division.devices
    if described or devices is None:
        order = range(count) if devices is None else [device.id for device in devices]
        known = topology_for(topology, count, per_host(count), "today")
    else:
        hosts = [_host_of(device) for device in devices]
        order = [(host, device.id) for host, device in zip(hosts, devices, strict=True)]
        even = len({hosts.count(host) for host in hosts}) == 1
        preset = "local" if devices[0].platform == "cpu" else "today"
        known = topology_for(topology, count, hosts.count(hosts[0]) if even else count, preset)
    ranks = {one: rank for rank, one in enumerate(sorted(order))}
    return Machine(known, tuple(ranks[one] for one in order))


def topology_for(topology: Topology | str | None, count: int, per_host: int, preset: str) -> Topology:
    """A topology for so many devices.

    Args:
      topology: None is `per_host` on every host, with the links of the preset; a shape such as "2x4" likewise; of a
        name without a shape, and of a topology, the outermost level is resized.

    Raises:
      TopologyError: there is none, or it has another number of devices.
    """
    if topology is None:
        return topology_named(f"{preset}@{count // per_host}x{per_host}")
    if isinstance(topology, str) and _SHAPE.fullmatch(topology):
        topology = f"{preset}@{topology}"
    shaped = isinstance(topology, str) and "@" in topology
    known = topology_named(topology) if isinstance(topology, str) else topology
    if known.devices == count or shaped:
        return known  # Machine refuses another number of devices
    first, *rest = known.axes
    inside = math.prod(axis.size for axis in rest)
    if count % inside == 0:
        return known.resized({first.name: count // inside})
    return known.resized({axis.name: 1 for axis in known.axes} | {known.axes[-1].name: count})


def _host_of(device: Any) -> int:
    """jax starts one process for each GPU on many clusters: there it tells the hosts by the slice of a device."""
    slices = {one.slice_index for one in jax.devices() if hasattr(one, "slice_index")}
    return device.slice_index if len(slices) > 1 else device.process_index


def processes_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """The processes that have these devices, in order."""
    return tuple(sorted({device.process_index for device in devices}))


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
