"""Random numbers of implementations that XLA computes in one operation with a state, drawn again as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.cases.within_share import (
    Made,
    Step,
    assert_same,
    descended,
    layers,
    normal,
    within_share,
)

WIDTH, ROWS = 32, 2048


def trained(loss: Callable[..., jax.Array]) -> Step:
    def step(weights: Any, x: jax.Array, key: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, key)
        return descended(weights, gradients), value

    return step


def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def split_for_layers(key: jax.Array) -> Made:
    """Dropout in a scan over layers, from keys split beforehand, differentiated."""

    def loss(weights: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(weights))
        layer = lambda y, inputs: (dropped(inputs[1], jnp.tanh(y @ inputs[0])), None)  # noqa: E731
        return (lax.scan(layer, x, (jnp.stack(weights), keys))[0] ** 2).mean()

    return trained(loss), (layers(3, WIDTH), normal(ROWS, WIDTH, seed=9), key)


def folded_in_steps(key: jax.Array) -> Made:
    """Three training steps in a loop, each with keys of its number and layer, in an unrolled network."""

    def loss(weights: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        for layer, weight in enumerate(weights):
            x = dropped(jax.random.fold_in(key, layer), jnp.tanh(x @ weight))
        return (x**2).mean()

    def step(weights: Any, x: jax.Array, key: jax.Array) -> Any:
        body = lambda trip, carry: trained(loss)(carry[0], x, jax.random.fold_in(key, trip))  # noqa: E731
        return lax.fori_loop(0, 3, body, (weights, jnp.float32(0)))

    return step, (layers(3, WIDTH), normal(ROWS, WIDTH, seed=9), key)


def denoised(key: jax.Array) -> Made:
    """A diffusion model: integers, normals and masks of the same key's children, one of which is returned."""

    def step(weights: Any, x: jax.Array, key: jax.Array) -> Any:
        after, times_key, noise_key, mask_key = jax.random.split(key, 4)
        times = jax.random.randint(times_key, (x.shape[0], 1), 1, 100) / 100
        noise = jax.random.normal(noise_key, x.shape)

        def loss(weights: Any) -> jax.Array:
            y = jnp.sqrt(1 - times) * x + jnp.sqrt(times) * noise
            for weight in weights:
                y = dropped(mask_key, y + jnp.tanh(y @ weight + times))
            return ((y - noise) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value, after

    return step, (layers(3, WIDTH), normal(ROWS, WIDTH, seed=9), key)


def drawn_in_branches(key: jax.Array) -> Made:
    """Each branch draws from another distribution; which one says another draw."""

    def loss(weights: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        for weight, subkey in zip(weights, jax.random.split(key, len(weights)), strict=True):
            soft = lambda x, subkey: x + 0.1 * jax.random.gumbel(subkey, x.shape)  # noqa: E731
            x = lax.cond(
                jax.random.uniform(subkey) < 0.5,
                lambda x, subkey: dropped(subkey, x),
                soft,
                jnp.tanh(x @ weight),
                subkey,
            )
        return (x**2).mean()

    return trained(loss), (layers(3, WIDTH), normal(ROWS, WIDTH, seed=9), key)


def of_each_sample(key: jax.Array) -> Made:
    """A key for each of a few samples under `vmap`, where one operation draws for all; raw bits."""

    def loss(weights: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        def sample(x: jax.Array, key: jax.Array) -> jax.Array:
            for layer, weight in enumerate(weights):
                x = dropped(jax.random.fold_in(key, layer), jnp.tanh(x @ weight))
            return x * (jax.random.bits(key, (x.shape[0], 1)) % 2)

        return (jax.vmap(sample)(x.reshape(4, -1, WIDTH), jax.random.split(key, 4)) ** 2).mean()

    return trained(loss), (layers(3, WIDTH), normal(ROWS, WIDTH, seed=9), key)


@pytest.mark.parametrize(
    ("make", "impl", "share"),
    [
        pytest.param(split_for_layers, "rbg", 0.8, marks=pytest.mark.slow),
        (folded_in_steps, "unsafe_rbg", 0.7),
        pytest.param(denoised, "rbg", 0.8, marks=pytest.mark.slow),
        pytest.param(drawn_in_branches, "unsafe_rbg", 0.8, marks=pytest.mark.slow),
        (of_each_sample, "rbg", 0.8),
    ],
)
def test_numbers_are_drawn_as_they_were(
    make: Callable[[jax.Array], Made], impl: str, share: float
) -> None:
    step, args = make(jax.random.key(7, impl=impl))
    run = within_share(share, step, args, split=False)
    assert_same(run.planned.compile()(*args), run.plain(*args), run)
