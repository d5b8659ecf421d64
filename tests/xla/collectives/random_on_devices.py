"""Random programs of collectives over eight CPU devices, as XLA compiles them and in phases; prints one JSON object.

All numbers are whole and small, so that every order of adding gives the same bits, in float16 too. Run in a process of
its own, with the first program's number and how many.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from memplan.hardware.backend import CPU, GPU
from tests.xla.collectives.links import steep
from tests.xla.collectives.shaped_on_devices import Step, mesh_of, off, run_shaped, spread

_SIZES = ((2, 4), (4, 2), (2, 2, 2))
_KINDS = ("psum", "psums", "gather", "scatter", "loop", "dot", "pmax", "join")
_SEED = 20260
# The back end, and the type of sums between hosts. XLA:CPU runs a GPU's collectives, but no all-to-all of an array.
_FORMS = {"cpu": (CPU, None), "gpu": (replace(GPU, exchanges_tuples=True), "float16")}


def small(x: jax.Array) -> jax.Array:
    """Whole numbers of at most 7."""
    return jnp.remainder(x, 15) - 7


def program(mesh: Mesh, rng: np.random.Generator) -> Step:
    """Some collectives on what others gave, over random axes; each device's copy of each is a result."""
    choices = [(str(rng.choice(_KINDS)), rng.integers(0, 2**31)) for _ in range(rng.integers(3, 9))]
    whole = PartitionSpec(mesh.axis_names)

    def local(x: jax.Array) -> Any:
        values = [x[0], x[0].T, x[0, :3, 0], x[0, 0, 0]]
        for kind, seed in choices:
            values += map(small, _Made(mesh, np.random.default_rng(seed), values).by(kind))
        return [value[None] for value in values]

    return jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


class _Made:
    """What a collective makes of arrays that are known."""

    def __init__(self, mesh: Mesh, rng: np.random.Generator, values: list[jax.Array]) -> None:
        names = list(mesh.axis_names)
        self._rng, self._known = rng, values
        self._axes = tuple(
            str(name) for name in rng.permutation(names)[: rng.integers(1, len(names) + 1)]
        )
        self._count = int(np.prod([mesh.shape[name] for name in self._axes]))

    def by(self, kind: str) -> list[jax.Array]:
        return getattr(self, f"_{kind}")()

    def _pick(self, least_dims: int = 0) -> jax.Array:
        usual = [value for value in self._known if value.ndim >= least_dims and value.size < 4096]
        return usual[self._rng.integers(len(usual))]

    def _psum(self) -> list[jax.Array]:
        return [jax.lax.psum(self._pick(), self._axes)]

    def _psums(self) -> list[jax.Array]:
        return list(jax.lax.psum(tuple(self._pick() for _ in range(3)), self._axes))

    def _gather(self) -> list[jax.Array]:
        x = self._pick(1)
        dim = int(self._rng.integers(x.ndim))
        return [jax.lax.all_gather(x, self._axes, axis=dim, tiled=bool(self._rng.integers(2)))]

    def _scatter(self) -> list[jax.Array]:
        x = self._pick(1)
        dim = int(self._rng.integers(x.ndim))
        repeated = jnp.concatenate([x + at for at in range(self._count)], dim)
        return [jax.lax.psum_scatter(repeated, self._axes, scatter_dimension=dim, tiled=True)]

    def _loop(self) -> list[jax.Array]:
        x = self._pick()

        def trip(total: jax.Array, at: jax.Array) -> Any:
            return total + jax.lax.psum(small(x * at), self._axes), at

        return [jax.lax.scan(trip, jnp.zeros_like(x), jnp.arange(4.0))[0]]

    def _dot(self) -> list[jax.Array]:
        x = self._pick(2)
        flat = x.reshape(x.shape[0], -1)
        return [flat @ flat.T]

    def _pmax(self) -> list[jax.Array]:
        return [jax.lax.pmax(self._pick(), self._axes)]

    def _join(self) -> list[jax.Array]:
        x, y = self._pick(), self._pick()
        return [small(x) * small(y).sum()]


def differences(number: int) -> tuple[dict[str, float], Counter[str]]:
    """How far each form of a program is off, and the collectives that were written."""
    rng = np.random.default_rng((_SEED, number))
    sizes = _SIZES[rng.integers(len(_SIZES))]
    mesh = mesh_of(*sizes)
    machine = replace(
        steep(*sizes), devices=tuple(map(int, rng.permutation(8) if rng.integers(2) else range(8)))
    )
    x = spread(mesh, jnp.asarray(rng.integers(-7, 8, (8, *rng.integers(3, 6, 2))), jnp.float32))
    step = program(mesh, rng)
    expected, errors, written = jax.jit(step)(x), dict[str, float](), Counter[str]()
    for form, (backend, wire) in _FORMS.items():
        results, module = run_shaped(step, (x,), machine, wire=wire, backend=backend)
        errors[form] = off(expected, results)
        written.update(op.opcode for body in module.values() for op in body.ops.values())
    return errors, written


def main(first: int, count: int) -> None:
    wrong, written = dict[int, dict[str, float]](), Counter[str]()
    for number in range(first, first + count):
        errors, kinds = differences(number)
        written += kinds
        if any(errors.values()):
            wrong[number] = errors
        jax.clear_caches()
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    print(json.dumps({"wrong": wrong, "written": {kind: written[kind] for kind in kinds}}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
