"""Which sums travel together: what nothing heavy waits for, in buckets; what reads them comes last."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memplan.hardware.catalog import named
from memplan.hardware.topology import topology_named
from memplan.parallel.emit.buckets import assign_buckets, sink_reads
from memplan.parallel.partition.propagate import propagate
from memplan.parallel.partition.sharded import OutputDemand, Replicate, Shard, Sharded
from memplan.parallel.step import data_parallel
from memplan.program.flat import flatten
from tests.parallel.simulator.simulated import mesh


def two_layers(weights: Any, x: jax.Array) -> Any:
    """Plain SGD on two layers, which reads each gradient at once, and the loss."""

    def loss(weights: Any) -> jax.Array:
        return (jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], value


def sharded() -> Sharded:
    weight, x = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)
    flat = flatten(jax.make_jaxpr(two_layers)([weight, weight], x))
    return propagate(flat, [Replicate(), Replicate(), Shard(0)], [OutputDemand()] * 3, 8)


def test_reads_of_sums_sink_below_the_heavy_work_that_does_not_need_them() -> None:
    before, after = sharded(), sink_reads(sharded())
    assert sorted(map(str, before.jaxpr.jaxpr.eqns)) == sorted(map(str, after.jaxpr.jaxpr.eqns))
    defined = set(after.jaxpr.jaxpr.invars)
    read, last_heavy = [], 0
    for number, eqn in enumerate(after.jaxpr.jaxpr.eqns):
        operands = {atom for atom in eqn.invars if not hasattr(atom, "val")}
        assert operands <= defined
        defined.update(eqn.outvars)
        read += [number] if operands & set(after.reductions) else []
        last_heavy = number if eqn.primitive.name == "dot_general" else last_heavy
    assert read and min(read) > last_heavy


def test_gradients_made_before_heavy_work_are_in_a_bucket_and_the_last_ones_in_another() -> None:
    found = sink_reads(sharded())
    buckets = assign_buckets(found, topology_named("ddl@2x4"), named("v100"), compresses=False)
    assert set(buckets.bucket_of) == set(found.reductions) and not buckets.uncompressed
    shapes: dict[int, list[int]] = {}
    for var, bucket in buckets.bucket_of.items():
        shapes.setdefault(bucket, []).append(var.aval.size)
    assert max(shapes) == len(shapes) - 1 and shapes[max(shapes)] == [256 * 256]  # of the first layer, which is last


def test_what_is_small_is_not_compressed() -> None:
    found = sink_reads(sharded())
    buckets = assign_buckets(found, topology_named("ddl@2x4"), named("v100"), compresses=True)
    small = {var for var, bucket in buckets.bucket_of.items() if bucket in buckets.uncompressed}
    assert [var.aval.shape for var in small] == [()]  # the loss


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_the_gradients_of_plain_sgd_travel_in_buckets_too(momentum: float | None) -> None:
    optimizer = optax.sgd(0.1, momentum)

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            hidden = x
            for w in weights:
                hidden = jnp.tanh(hidden @ w)
            return (hidden**2).mean()

        weights, opt_state = state
        updates, opt_state = optimizer.update(jax.grad(loss)(weights), opt_state)
        return optax.apply_updates(weights, updates), opt_state

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 24
    state = weights, jax.eval_shape(optimizer.init, weights)
    divided = data_parallel(step, mesh((2, 4)), device="v100")
    buckets = divided.divided((state, jax.ShapeDtypeStruct((4096, 2048), jnp.float32))).buckets
    sizes = np.bincount([number for number in buckets.bucket_of.values() if number >= 0]) * 2**24
    assert sizes.sum() == 24 * 2**24 and len(sizes) >= 4 and sizes[-1] <= 2**26
