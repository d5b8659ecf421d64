"""The links of a mesh, measured: one all-reduce per axis, small and large, timed where it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.hardware.collectives import LAUNCH_S
from memplan.hardware.topology import Axis, Topology

SMALL_BYTES, LARGE_BYTES = 1 << 12, 4 << 20
_RUNS = 5


def measure_topology(mesh: Mesh, name: str = "measured") -> Topology:
    """Latency and bandwidth of every axis, the same in all processes.

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
        small, large = _of_rank_0([_seconds(mesh, axis, nbytes) for nbytes in (SMALL_BYTES, LARGE_BYTES)])
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
    names = tuple(mesh.axis_names)
    floats = nbytes // 4
    own = NamedSharding(mesh, PartitionSpec(names))
    values = jax.make_array_from_callback(
        (mesh.devices.size * floats,), own, lambda index: np.zeros(floats, np.float32)
    )
    reduce = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.psum(part, axis), mesh=mesh, in_specs=own.spec, out_specs=own.spec, check_vma=False
        )
    )
    jax.block_until_ready(reduce(values))
    return min(_timed(lambda: jax.block_until_ready(reduce(values))) for _ in range(_RUNS))


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _of_rank_0(seconds: list[float]) -> list[float]:
    """What rank 0 measured."""
    if jax.process_count() == 1:
        return seconds
    return [float(one) for one in multihost_utils.broadcast_one_to_all(np.asarray(seconds))]
