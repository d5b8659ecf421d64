"""A step on simulated devices: one process, no devices, no compilation; and the same step on one.

What runs is the product's own program for a device, collectives and all; only the engine is another (`lockstep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from memplan.parallel.partition.assigned import Assigned, Step
from memplan.parallel.partition.placement import Layout
from memplan.parallel.step import DataParallel
from memplan.program import compat
from tests.parallel.partition.kernels import Keys
from tests.parallel.partition.lockstep import lockstep


def mesh(sizes: Sequence[int]) -> AbstractMesh:
    """Axes `a0`, `a1`, ..., outermost first."""
    return AbstractMesh(tuple(sizes), tuple(f"a{i}" for i in range(len(sizes))))


def simulated(divided: DataParallel, *args: Any) -> Any:
    """The results of one step, put together again; an AssertionError where devices disagree on what all have whole."""
    known, layouts = divided.divided(args), divided.layouts(*args)
    parts = [_apart(leaf, layout, divided.devices) for leaf, layout in zip(jax.tree.leaves(args), layouts, strict=True)]
    results = lockstep(program_of(divided, *args), parts, divided.topology.sizes)
    outputs = known.assigned.outputs
    together = [_together(values, layout) for values, layout in zip(results, outputs, strict=True)]
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
        _part(jax.typeof(leaf), layout, divided.devices)
        for leaf, layout in zip(jax.tree.leaves(args), divided.layouts(*args), strict=True)
    ]
    axes = list(divided.topology.sizes.items())
    return jax.make_jaxpr(lambda *parts: divided.local(known, parts, None)[0], axis_env=axes)(*shapes)


def _part(aval: Any, layout: Layout, devices: int) -> jax.ShapeDtypeStruct:
    shape = [size // devices if dim == layout.dim else size for dim, size in enumerate(aval.shape)]
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _apart(leaf: Any, layout: Layout, devices: int) -> list[Any]:
    leaf = np.asarray(leaf) if layout.is_split else leaf
    return np.split(leaf, devices, layout.dim) if layout.is_split else [leaf] * devices


def _together(parts: Sequence[Any], layout: Layout) -> Any:
    if layout.is_split and isinstance(parts[0], Keys):
        return Keys(np.concatenate([part.words for part in parts], layout.dim), parts[0].dtype)
    if layout.is_split:
        return np.concatenate(parts, layout.dim)
    assert all(raw(part).tobytes() == raw(parts[0]).tobytes() for part in parts), "replicas differ"
    return parts[0]


def raw(value: Any) -> np.ndarray:
    """As numpy holds it; keys as their words."""
    if isinstance(value, Keys):
        return value.words
    keys = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if keys else value)


def steps_of(assigned: Assigned) -> Iterator[tuple[compat.JaxprEqn, Step]]:
    """Every equation with what became of it, loops included."""
    for eqn, step in zip(assigned.jaxpr.jaxpr.eqns, assigned.steps, strict=True):
        yield eqn, step
        for body in step.bodies:
            yield from steps_of(body)
