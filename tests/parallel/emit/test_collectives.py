"""Collectives on simulated devices: sums and extrema of all, whatever their phases, and no more than are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memplan.hardware.topology import topology_named
from memplan.parallel.emit.collectives import Collectives
from memplan.parallel.partition.sharded import Placement, Replicate, Shard
from tests.parallel.simulator.lockstep import lockstep
from tests.parallel.simulator.simulated import array, assert_same, collectives

ROWS, FEATURES = 24, 6
W, X = array(FEATURES, FEATURES, seed=1), array(ROWS, FEATURES)
LABELS = jnp.arange(ROWS) % FEATURES
LINKS = topology_named("ddl@2x3")


def on_devices(function: Callable[..., Any], *parts: Sequence[Any]) -> list[list[Any]]:
    """The results of what each of six devices does, from its part of every argument."""
    shapes = [jax.typeof(part[0]) for part in parts]
    closed = jax.make_jaxpr(function, axis_env=list(LINKS.sizes.items()))(*shapes)
    return lockstep(closed, parts, LINKS.sizes)


def terms(*shape: int, seed: int = 0) -> list[jax.Array]:
    return list(jnp.round(8 * array(6, *shape, seed=seed)))  # whole numbers: sums are exact in any order


@pytest.mark.parametrize("decomposes", [True, False])
@pytest.mark.parametrize("trusts_reduce_scatter", [True, False])
def test_terms_are_summed_in_the_placements_asked_for(decomposes: bool, trusts_reduce_scatter: bool) -> None:
    placements: list[Placement] = [Replicate(), Shard(1), Replicate(), Shard(0)]
    given = [terms(5, seed=1), terms(2, 12, seed=2), terms(3, 4, seed=3), terms(6, seed=4)]
    made = Collectives(LINKS, decomposes, trusts_reduce_scatter=trusts_reduce_scatter)

    def reduce(*parts: Any) -> list[Any]:
        return [take() for take in made.reduce(parts, placements, lossy=False)]

    for one, summed, placement in zip(given, on_devices(reduce, *given), placements, strict=True):
        whole = np.sum(one, axis=0)
        parts = np.split(whole, 6, placement.dim) if isinstance(placement, Shard) else [whole] * 6
        for part, expected in zip(summed, parts, strict=True):
            np.testing.assert_array_equal(part, expected)
    assert [one.terms for one in made.sums] == [2, 2]  # what lies alike travels together


def test_what_is_gathered_is_what_was_split() -> None:
    whole = array(12, 18)
    made = Collectives(LINKS)
    for dim in (0, 1):
        ((*found,),) = on_devices(lambda part, dim=dim: made.all_gather([part], [dim]), np.split(whole, 6, dim))
        for one in found:
            np.testing.assert_array_equal(one, whole)
        (found,) = on_devices(lambda whole, dim=dim: [made.shard(whole, dim)], [whole] * 6)
        np.testing.assert_array_equal(np.concatenate(found, dim), whole)


def test_no_reduce_scatter_is_left_to_gloo() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.9 * state["m"], "m": 0.9 * state["m"] + gradient}

    state = {"w": array(8, 8), "m": array(8, 8, seed=1)}
    here = jax.make_mesh((1, 1), ("host", "device"))
    divided, _ = assert_same(step, state, array(ROWS, 8), split_state="m")
    assert "reduce_scatter" in collectives(divided, state, array(ROWS, 8))
    divided.mesh = here  # of a CPU
    assert collectives(divided, state, array(ROWS, 8)) == {"all_to_all", "all_gather"}


def test_the_commonest_loss_gathers_nothing() -> None:
    def step(w: jax.Array, batch: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(batch[0] @ w, batch[1]).mean()

        return jax.value_and_grad(loss)(w)

    divided, told = assert_same(step, W, (X, LABELS))
    assert not told and collectives(divided, W, (X, LABELS)) == {"psum"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("at", range(4))
def test_what_is_not_a_number_is_not_lost_in_a_maximum(at: int, dtype: Any) -> None:
    x = jnp.asarray([[0.0, -jnp.inf, -1.0], [1.0, 3.0, -2.0], [-2.0, jnp.inf, -3.5], [-0.0, 2.0, -4.0]], dtype)
    for given in (x, x.at[at, 0].set(jnp.nan), x.at[at, 0].set(-jnp.nan)):
        assert_same(lambda w, x: (x.max(0), x.min(0), x.max(), x.min()), W, given)
