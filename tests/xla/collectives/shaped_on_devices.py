"""Runs steps over CPU devices with their collectives in phases."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.compilation.shaping import Shaping
from memplan.hardware.backend import CPU, Backend
from memplan.hardware.machine import Machine
from memplan.xla.hook import intercept
from memplan.xla.module import Module

Step = Callable[..., Any]

_SEPARATE = "cpu-all-reduce-combiner"
_UNFUSED = f"{_SEPARATE},fusion,fusion-wrapper"


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(sizes), ("a", "b", "c")[: len(sizes)])


def spread(mesh: Mesh, x: Any) -> jax.Array:
    """An array whose first dimension lies over all devices."""
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))


def run_shaped(
    step: Step,
    args: Sequence[Any],
    machine: Machine,
    *,
    wire: str | None = None,
    backend: Backend = CPU,
    unfused: bool = False,
) -> tuple[Any, Module]:
    """Results, and the module that XLA went on with.

    Args:
      backend: gets these collectives; within one process XLA:CPU runs all of a GPU's but arrays' all-to-all.
      unfused: XLA:CPU calls back behind fusion, XLA:GPU before it, and no sum leaves a loop out of a fusion. XLA:CPU
        transposes some results of a program wrongly then, so it is for steps that are loops.
    """

    def shaped(*args: Any) -> Any:
        return step(*args)

    shaping, written = Shaping(machine, backend, wire), list[Module]()

    def shape(module: Module) -> Module | None:
        result = shaping(module)
        written.append(result or module)
        return result

    with intercept("jit_shaped", lambda module: None, "cpu", shape) as interception:
        compiled = (
            jax.jit(shaped)
            .lower(*args)
            .compile(
                compiler_options={"xla_disable_hlo_passes": _UNFUSED if unfused else _SEPARATE}
            )
        )
    interception.check()
    (module,) = written
    return compiled(*args), module


def off(a: Any, b: Any) -> float:
    """Largest difference, on any device, over the largest magnitude of a leaf there; infinite where a type differs."""

    def leaf(x: jax.Array, y: jax.Array) -> float:
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return float("inf")
        error = 0.0
        for x_shard, y_shard in zip(x.addressable_shards, y.addressable_shards, strict=True):
            p, q = np.asarray(x_shard.data, np.float64), np.asarray(y_shard.data, np.float64)
            error = (
                max(error, float(np.abs(p - q).max() / max(np.abs(p).max(), 1e-3)))
                if p.size
                else error
            )
        return error

    return max(jax.tree.leaves(jax.tree.map(leaf, a, b)), default=0.0)
