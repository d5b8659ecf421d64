"""Meshes, the machine below them, and its links: from presets, or measured by all-reduces."""

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

SMALL_BYTES = 1 << 12
# Eight GPUs of a host sum so many along a ring: over NVLink 191 us, along trees 214.
LARGE_BYTES = 32 << 20
_RUNS = 5
_SHAPE = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})*")


def mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of all devices of all processes, or of the first ones.

    Args:
      sizes: axis -> size, outermost first. Default: the processes (`host`) and the devices of each
        (`device`).

    Raises:
      MeshError: there are fewer devices, or processes have unequal numbers of them.

    Example:
      >>> from memplan import parallel
      >>> parallel.mesh({"data": 1}).axis_names
      ('data',)
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if sizes is None:
        counts = dict.fromkeys(range(jax.process_count()), 0)
        for device in devices:
            counts[device.process_index] += 1
        if len(set(counts.values())) > 1:
            raise MeshError(
                f"the processes have unequal numbers of devices ({counts}): no mesh of hosts and "
                "devices holds all. Start them with equal numbers, or give the sizes of a mesh."
            )
        sizes = {"host": len(counts), "device": len(devices) // len(counts)}
    count = math.prod(sizes.values())
    if count > len(devices) or min(sizes.values(), default=1) < 1:
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise MeshError(
            f"a mesh of {shape} needs {count} devices; there are {len(devices)} in "
            f"{jax.process_count()} processes. Take a smaller mesh, or start more processes "
            "(memplan launch -n)."
        )
    return Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def machine_of(
    division: compat.Division, topology: Topology | str | None, described: bool
) -> Machine:
    """The machine that a step's partitions run on.

    Args:
      topology: as for `memplan.jit`.
      described: the step is compiled for absent devices, which replace its own in the order of
        their numbers.

    Raises:
      TopologyError: it has another number of devices.
    """
    count = division.count
    devices = division.devices
    assumed = "links" if topology is None or _is_shape(topology) else ""
    if described or devices is None:
        # the hosts of devices that are here are those of their processes
        assumed = "hosts and links" if topology is None else assumed
        order = range(count) if devices is None else [device.id for device in devices]
        links = topology_for(topology, count, per_host(count), "today")
    else:
        hosts = [_host_of(device) for device in devices]
        order = [(host, device.id) for host, device in zip(hosts, devices, strict=True)]
        even = len({hosts.count(host) for host in hosts}) == 1
        preset = "local" if devices[0].platform == "cpu" else "today"
        links = topology_for(topology, count, hosts.count(hosts[0]) if even else count, preset)
    ranks = {key: rank for rank, key in enumerate(sorted(order))}
    numbers = tuple(ranks[key] for key in order)
    return Machine(links, numbers, assumed)


def _is_shape(topology: Topology | str) -> bool:
    """Does it give the sizes of levels alone, as "2x4"?"""
    return isinstance(topology, str) and _SHAPE.fullmatch(topology) is not None


def topology_for(
    topology: Topology | str | None, count: int, per_host: int, preset: str
) -> Topology:
    """A topology for so many devices.

    Args:
      topology: None is `per_host` devices on every host, with the links of the preset. A shape such
        as "2x4" takes the preset's links, too. The outermost level of a topology, or of a name
        without a shape, is resized.

    Raises:
      TopologyError: there is none, or it has another number of devices.
    """
    if topology is None:
        return topology_named(f"{preset}@{count // per_host}x{per_host}")
    if _is_shape(topology):
        topology = f"{preset}@{topology}"
    shaped = isinstance(topology, str) and "@" in topology
    links = topology_named(topology) if isinstance(topology, str) else topology
    if links.devices == count or shaped:
        return links  # Machine refuses another number of devices
    outermost, *inner_axes = links.axes
    inside = math.prod(axis.size for axis in inner_axes)
    if count % inside == 0:
        return links.resized({outermost.name: count // inside})
    return links.resized({axis.name: 1 for axis in links.axes} | {links.axes[-1].name: count})


def _host_of(device: Any) -> int:
    """The host of a device: its process or, where each GPU has a process of its own, its slice."""
    slices = {peer.slice_index for peer in jax.devices() if hasattr(peer, "slice_index")}
    return device.slice_index if len(slices) > 1 else device.process_index


def processes_with(devices: Iterable[Any]) -> tuple[int, ...]:
    """The processes that have these devices, in order."""
    return tuple(sorted({device.process_index for device in devices}))


def processes_of(division: compat.Division | None, described: bool) -> tuple[int, ...]:
    """The processes that run a step's partitions; none for one device and for absent ones."""
    if division is None or described:
        return ()
    return processes_with(division.devices or ())


def measure_topology(mesh: Mesh, name: str = "measured") -> Topology:
    """Measure latency and bandwidth of every axis by a small and a large all-reduce.

    Every process of the mesh must call it; all get the same result. Groups of the other axes send
    at the same time, so this measures the whole bandwidth of a link that they share. Each time is
    the best of five runs, minus the launch overhead that the cost model adds.
    """
    axes = []
    for level, (axis, size) in enumerate(mesh.shape.items()):
        inner = math.prod(list(mesh.shape.values())[level + 1 :])
        shared = level < len(mesh.shape) - 1
        if size == 1:
            axes.append(Axis(axis, 1, 0.0, 1e12, shared))
            continue
        times = np.asarray([_seconds(mesh, axis, nbytes) for nbytes in (SMALL_BYTES, LARGE_BYTES)])
        if jax.process_count() > 1:  # all take the times of rank 0
            times = multihost_utils.broadcast_one_to_all(times)
        small_s, large_s = map(float, times)
        # The small sum goes along trees, the large one around a ring.
        latency_s = max(0.0, small_s - LAUNCH_S) / (2 * (size - 1).bit_length())
        steps = 2 * (size - 1)
        sent = steps / size * LARGE_BYTES * (inner if shared else 1)
        bytes_s = large_s - LAUNCH_S - steps * latency_s
        axes.append(Axis(axis, size, latency_s, sent / max(bytes_s, 1e-9), shared))
    kind = mesh.devices.flat[0].device_kind
    source = (
        f"measured by memplan on jax {jax.__version__}: all-reduces of {SMALL_BYTES} and "
        f"{LARGE_BYTES} bytes per axis"
    )
    return Topology(
        name=name,
        description=f"{mesh.devices.size} devices ({kind}) in {jax.process_count()} processes",
        axes=tuple(axes),
        sources=(source,),
    )


def _seconds(mesh: Mesh, axis: str, nbytes: int) -> float:
    """Seconds of an all-reduce of `nbytes` on every device over an axis: the fastest run."""
    part = np.zeros(nbytes // 4, np.float32)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    shape = (mesh.devices.size * part.size,)
    values = jax.make_array_from_callback(shape, sharding, lambda index: part)
    reduce = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.psum(part, axis),
            mesh=mesh,
            in_specs=sharding.spec,
            out_specs=sharding.spec,
            check_vma=False,
        )
    )
    jax.block_until_ready(reduce(values))
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(reduce(values))
        times.append(time.perf_counter() - start)
    return min(times)
