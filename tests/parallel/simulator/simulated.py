"""A step on simulated devices: one process, no devices, no compilation; and the same step on one.

What runs is the product's own program for a device, collectives and all; only the engine is another (`lockstep`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from memplan.parallel.partition.sharded import Placement, Shard, Sharded, ShardedEqn
from memplan.parallel.step import DataParallel, data_parallel
from memplan.program import compat
from tests.parallel.simulator.kernels import Keys
from tests.parallel.simulator.lockstep import lockstep


def mesh(sizes: Sequence[int]) -> AbstractMesh:
    """Axes `a0`, `a1`, ..., outermost first."""
    return AbstractMesh(tuple(sizes), tuple(f"a{i}" for i in range(len(sizes))))


def simulated(divided: DataParallel, *args: Any) -> Any:
    """The results of one step, put together again; an AssertionError where devices disagree on what all have whole."""
    known, inputs = divided.divided(args), divided.layouts(*args)
    parts = [_apart(leaf, one, divided.devices) for leaf, one in zip(jax.tree.leaves(args), inputs, strict=True)]
    results = lockstep(program_of(divided, *args), parts, divided.topology.sizes)
    outputs = known.sharded.outputs
    together = [_together(values, placement) for values, placement in zip(results, outputs, strict=True)]
    return jax.tree_util.tree_unflatten(known.out_tree, together)


def alone(step: Callable[..., Any], *args: Any) -> Any:
    """The results on one device, by the same engine."""
    traced = jax.jit(step).trace(*args)
    results = lockstep(traced.jaxpr, [[leaf] for leaf in jax.tree.leaves(args)], {})
    return jax.tree_util.tree_unflatten(traced.out_tree, [value for (value,) in results])


def program_of(divided: DataParallel, *args: Any) -> compat.ClosedJaxpr:
    """What one device runs."""
    known = divided.divided(args)
    shapes = [
        _part(jax.typeof(leaf), placement, divided.devices)
        for leaf, placement in zip(jax.tree.leaves(args), divided.layouts(*args), strict=True)
    ]
    axes = list(divided.topology.sizes.items())
    return jax.make_jaxpr(lambda *parts: divided.local(known, parts, None)[0], axis_env=axes)(*shapes)


def _part(aval: Any, placement: Placement, devices: int) -> jax.ShapeDtypeStruct:
    shape = [size // devices if placement == Shard(dim) else size for dim, size in enumerate(aval.shape)]
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _apart(leaf: Any, placement: Placement, devices: int) -> list[Any]:
    return np.split(np.asarray(leaf), devices, placement.dim) if isinstance(placement, Shard) else [leaf] * devices


def _together(parts: Sequence[Any], placement: Placement) -> Any:
    if not isinstance(placement, Shard):
        assert all(raw(part).tobytes() == raw(parts[0]).tobytes() for part in parts), "replicas differ"
        return parts[0]
    if isinstance(parts[0], Keys):
        return Keys(np.concatenate([part.words for part in parts], placement.dim), parts[0].dtype)
    return np.concatenate(parts, placement.dim)


def raw(value: Any) -> np.ndarray:
    """As numpy holds it; keys as their words."""
    if isinstance(value, Keys):
        return value.words
    keys = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if keys else value)


def equations(sharded: Sharded) -> Iterator[tuple[compat.JaxprEqn, ShardedEqn]]:
    """Every equation with how it is divided, loops included."""
    for eqn, one in zip(sharded.jaxpr.jaxpr.eqns, sharded.eqns, strict=True):
        yield eqn, one
        for body in one.bodies:
            yield from equations(body)


def assert_same(
    step: Callable[..., Any], *args: Any, sizes: Sequence[int] = (4,), **options: Any
) -> tuple[DataParallel, list[str]]:
    """Checks the numbers of one step against those of one device; the divided step, and what it warned of."""
    divided = data_parallel(step, mesh(sizes), **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        found = simulated(divided, *args)
    for expected, one in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(found), strict=True):
        wide = np.float32 if raw(expected).dtype == jnp.bfloat16 else raw(expected).dtype
        np.testing.assert_allclose(raw(one).astype(wide), raw(expected).astype(wide), rtol=2e-5, atol=2e-6)
    return divided, [str(one.message) for one in told]


def collectives(divided: DataParallel, *args: Any) -> set[str]:
    """Those that one device takes part in."""
    made = {eqn.primitive.name for eqn in program_of(divided, *args).jaxpr.eqns}
    return made & {"all_gather", "psum", "all_to_all", "reduce_scatter"}


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
