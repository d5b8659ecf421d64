"""Steps of all kinds on simulated devices, each against one device: those that were once divided wrongly among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.parallel.partition.sharded import Placement, Shard
from memplan.parallel.step import DataParallel
from tests.parallel.simulator.simulated import array, assert_same, collectives, equations

ROWS, FEATURES = 24, 6
W, X = array(FEATURES, FEATURES, seed=1), array(ROWS, FEATURES)
Step = Callable[..., Any]


def outputs(divided: DataParallel, *args: Any) -> list[Placement]:
    return list(divided.divided(args).sharded.outputs)


@pytest.mark.parametrize("kind", [jax.random.key, jax.random.PRNGKey, lambda seed: jax.random.key(seed, impl="rbg")])
@pytest.mark.parametrize("features", [4, 8])
def test_every_example_draws_from_its_own_key(kind: Callable[[int], jax.Array], features: int) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def one(key: jax.Array, row: jax.Array) -> Any:
            drops = jax.random.bernoulli(key, 0.5, row.shape)
            return row + jax.random.normal(key, row.shape), drops, jax.random.permutation(key, row)

        return jax.vmap(one)(jax.random.split(kind(0), x.shape[0]), x)

    divided, _ = assert_same(step, W, array(ROWS, features))
    if "rbg" not in str(kind(0).dtype):
        assert outputs(divided, W, array(ROWS, features))[0] == Shard(0)


def test_maps_along_the_batch_are_divided() -> None:
    divided, told = assert_same(lambda w, x: jax.lax.map(lambda row: jnp.tanh(row @ w), x), W, X)
    assert not told and not collectives(divided, W, X) and outputs(divided, W, X) == [Shard(0)]


def dropped(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
        noise = jax.random.normal(jax.random.key(4), x.shape)
        return (jnp.where(kept, x @ w, 0.0) * noise).mean()

    return jax.value_and_grad(loss)(w)


def scaled(w: jax.Array, x: jax.Array) -> Any:
    """Loss scaling: an update is left out where the scaled gradient overflows."""
    scale = jnp.float16(1024)

    def loss(w: jax.Array) -> jax.Array:
        return ((x.astype(jnp.float16) @ w.astype(jnp.float16)) ** 2).mean() * scale

    gradient = jax.grad(loss)(w) / scale.astype(jnp.float32)
    finite = jnp.isfinite(gradient).all()
    return jax.lax.cond(finite, lambda: w - 0.01 * gradient, lambda: w), finite


def layered(w: jax.Array, x: jax.Array) -> Any:
    """A scan over layers, forward and back."""

    def loss(stack: jax.Array) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)
        return (hidden**2).sum() / x.shape[0]

    return jax.value_and_grad(loss)(jnp.stack([w, 0.5 * w, -w]))


def of_each_example(w: jax.Array, x: jax.Array) -> Any:
    return (x @ w).max(1), (x @ w).max(), (x > 0).all(), x.argmax(1)


def halved(w: jax.Array, x: jax.Array) -> Any:
    """A loop that goes on until every example is small."""
    _, value = jax.lax.while_loop(lambda c: jnp.abs(c[1]).max() > 0.1, lambda c: (c[0] + 1, c[1] / 2), (0, x @ w))
    return value


@pytest.mark.parametrize("step", [dropped, scaled, layered, of_each_example, halved])
def test_a_step_is_that_of_one_device_and_nothing_is_gathered(step: Step) -> None:
    divided, told = assert_same(step, W, X, sizes=(2, 4))
    assert not told and not collectives(divided, W, X) & {"all_gather", "all_to_all"}


@pytest.mark.parametrize("step", [of_each_example, halved])
def test_what_is_made_per_example_stays_divided(step: Step) -> None:
    divided, _ = assert_same(step, W, X, sizes=(2, 4))
    assert outputs(divided, W, X)[0] == Shard(0)


def accumulated(w: jax.Array, x: jax.Array) -> Any:
    """Microbatches (microbatch, example, feature); the gradients of all are added up."""

    def loss(w: jax.Array, part: jax.Array) -> jax.Array:
        return (jnp.tanh(part @ w) ** 2).mean()

    def trip(total: Any, part: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, part)
        return jax.tree.map(jnp.add, total, (value, gradient)), value

    return jax.lax.scan(trip, (jnp.zeros(()), jnp.zeros_like(w)), x)


def test_gradients_of_a_microbatch_travel_together() -> None:
    divided, _ = assert_same(accumulated, W, X.reshape(3, 8, FEATURES), sizes=(2, 4), batch_axis=1)
    assert [one.terms for one in divided.sums] == [2]


def twice(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.concatenate([x @ w, 2 * x @ w]) @ w)


def halves(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh((x @ w).reshape(2, -1)) * 2


def ordered(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sort(x @ w, axis=0) @ w)


@pytest.mark.parametrize(("step", "name"), [(twice, "concatenate"), (halves, "reshape"), (ordered, "sort")])
def test_what_follows_a_gather_is_divided_and_the_gather_is_told_with_its_line(step: Step, name: str) -> None:
    divided, told = assert_same(step, W, X)
    assert all(isinstance(one, Shard) for one in outputs(divided, W, X))
    assert told and all(f"{name} at " in one and "test_lower.py:" in one for one in told)


def test_microbatches_within_a_step_are_divided() -> None:
    """8 microbatches of 3 over 4 devices, and 2 of 12: the first are scanned along what is divided."""

    def step(count: int) -> Step:
        def accumulated(w: jax.Array, x: jax.Array) -> jax.Array:
            def trip(total: jax.Array, part: jax.Array) -> Any:
                return total + jax.grad(lambda w: (jnp.tanh(part @ w) ** 2).sum())(w), None

            return jax.lax.scan(trip, jnp.zeros_like(w), x.reshape(count, -1, FEATURES))[0]

        return accumulated

    for count in (2, 6):
        divided, _ = assert_same(step(count), W, X)
        sharded = divided.divided((W, X)).sharded
        (scan,) = (one for eqn, one in equations(sharded) if eqn.primitive.name == "scan")
        assert any(inner.axis is not None for inner in scan.bodies[0].eqns)


def test_whole_numbers_are_divided_after_they_are_summed() -> None:
    assert_same(lambda w, x: jnp.round(x * 7).astype(jnp.int32).sum(0) // 2, W, X)


def test_a_sum_is_rounded_once() -> None:
    """In bfloat16 the sum of rounded terms would be another number."""
    x = jnp.asarray(np.random.default_rng(0).integers(-2000, 2000, (ROWS, 1)), jnp.float32)
    assert_same(lambda w, x: x.sum(0).astype(jnp.bfloat16).astype(jnp.float32), W, x)
