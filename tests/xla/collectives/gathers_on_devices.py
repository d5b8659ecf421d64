"""Steps with all-gathers over several CPU devices, as XLA compiles them and level by level; prints one JSON object.

Run in a process of its own, with the number of devices.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={sys.argv[1]} --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memplan.hardware.machine import Machine
from memplan.xla.collectives.gathers import gathers_in_phases
from memplan.xla.module import Module
from tests.xla.collectives.hooked import before_scheduling
from tests.xla.collectives.machines import slow_outside

DEVICES = int(sys.argv[1])
SHAPES = {8: [(2, 4), (2, 2, 2)], 12: [(3, 4), (2, 3, 2)]}[DEVICES]
NAMES = ("a", "b", "c")


def gathered(mesh: Mesh, axes: Sequence[str], dim: int, ndim: int) -> Callable[[Any], Any]:
    """Each device's piece, gathered over these axes, and all of them together, so that each device's copy counts."""
    spec = PartitionSpec(tuple(mesh.axis_names), *[None] * (ndim - 1))

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x * 3, tuple(axes), axis=dim, tiled=True) + 1

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def sharded_layers(mesh: Mesh) -> Callable[[Any, Any], Any]:
    """Layers in a loop, whose weights are gathered in it forward and backward."""

    def step(ws: jax.Array, x: jax.Array) -> Any:
        whole = NamedSharding(mesh, PartitionSpec())

        def layer(h: jax.Array, w: jax.Array) -> Any:
            return jnp.sin(h @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.value_and_grad(lambda ws: (jax.lax.scan(layer, x, ws)[0] ** 2).sum())(ws)

    return step


def in_phases(module: Module, machine: Machine) -> Module:
    return gathers_in_phases(module, machine)


def cases() -> Iterator[tuple[str, Machine, Callable[..., Any], Sequence[Any], int]]:
    """Name, machine, step, arguments and the expected number of gathers."""
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        names = NAMES[: len(shape)]
        mesh, machine = Mesh(np.array(jax.devices()).reshape(shape), names), slow_outside(*shape)
        for count in range(1, len(shape) + 1):
            for axes in itertools.permutations(names, count):
                dim = sum(map(NAMES.index, axes)) % 3
                x = rng.normal(size=(3 * DEVICES, 5, 2)).astype(np.float32)
                yield f"{shape} {axes} {dim}", machine, gathered(mesh, axes, dim, 3), [x], count
        layers = rng.normal(size=(3, DEVICES * 2, DEVICES * 2)).astype(np.float32)
        for spec in (PartitionSpec(None, names), PartitionSpec(None, None, names[::-1])):
            ws = jax.device_put(layers, NamedSharding(mesh, spec))
            x = jax.device_put(layers[0], NamedSharding(mesh, PartitionSpec(names)))
            yield f"{shape} layers {spec}", machine, sharded_layers(mesh), [ws, x], len(shape)


def main() -> None:
    facts = {}
    for name, machine, step, args, expected in cases():
        plain = jax.jit(lambda *args, step=step: step(*args))(*args)
        with before_scheduling("cpu", lambda module, on=machine: in_phases(module, on)) as modules:
            shaped = jax.jit(lambda *args, step=step: step(*args)).lower(*args).compile()
        bodies = [body for module in modules for body in module.values()]
        gathers = sum(op.opcode == "all-gather" for body in bodies for op in body.ops.values())
        shaped = shaped(*args)
        pairs = zip(jax.tree.leaves(plain), jax.tree.leaves(shaped), strict=True)
        same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
        facts[name] = {"same": same, "gathers": gathers, "expected": expected}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
