"""Several training steps in one call, in loops of every kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from tests.cases.within_share import (
    Made,
    Make,
    assert_same,
    descended,
    layers,
    mlp,
    normal,
    within_share,
)

WIDTH, ROWS = 32, 2048


def square(weights: Any, x: jax.Array) -> jax.Array:
    return (mlp(weights, x) ** 2).mean()


def shuffled_epochs() -> Made:
    """Epochs of batches of Adam, in the order of a permutation that is drawn for each; a scan in a scan."""
    optimizer = optax.adam(1e-2)

    def step(state: Any, x: jax.Array, key: jax.Array) -> Any:
        def batch(state: Any, rows: jax.Array) -> Any:
            weights, moments = state
            value, gradients = jax.value_and_grad(square)(weights, x[rows])
            updates, moments = optimizer.update(gradients, moments)
            return (optax.apply_updates(weights, updates), moments), value

        def epoch(state: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, x.shape[0]).reshape(2, -1)
            state, values = lax.scan(batch, state, order)
            return state, values.mean()

        return lax.scan(epoch, state, jax.random.split(key, 3))

    weights = layers(4, WIDTH)
    return step, (
        (weights, optimizer.init(weights)),
        normal(2 * ROWS, WIDTH, seed=9),
        jax.random.key(1),
    )


def counted_slices() -> Made:
    """As many steps as an argument says, each with its own slice of the data: XLA knows no number of trips."""

    def step(state: Any, x: jax.Array, count: jax.Array) -> Any:
        def one(trip: jax.Array, carry: Any) -> Any:
            weights, speeds, losses = carry
            value, gradients = jax.value_and_grad(square)(
                weights, lax.dynamic_slice_in_dim(x, 64 * trip, ROWS)
            )
            speeds = jax.tree.map(lambda speed, gradient: 0.9 * speed + gradient, speeds, gradients)
            return descended(weights, speeds), speeds, losses.at[trip].set(value)

        return lax.fori_loop(0, count, one, state)

    weights = layers(5, WIDTH)
    return step, (
        (weights, [0 * weight for weight in weights], jnp.zeros(9)),
        normal(ROWS + 9 * 64, WIDTH, seed=9),
        3,
    )


def until_it_is_small() -> Made:
    """A `while_loop` whose condition itself computes the loss of all the data."""

    def step(weights: Any, x: jax.Array) -> Any:
        def goes_on(carry: Any) -> jax.Array:
            weights, _, trip = carry
            return (square(weights, 2 * x) > 0.02) & (trip < 4)

        def body(carry: Any) -> Any:
            weights, rate, trip = carry
            return descended(weights, jax.grad(square)(weights, x), rate), rate * 0.9, trip + 1

        return lax.while_loop(goes_on, body, (weights, jnp.float32(4), 0))

    return step, (layers(5, WIDTH), normal(ROWS, WIDTH, seed=9))


def rollouts_and_updates() -> Made:
    """Reinforcement learning: a scan of rollouts with resets by a condition, advantages backwards, clipped updates."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def moved(place: jax.Array, action: jax.Array, key: jax.Array) -> Any:
        place = 0.9 * place + 0.5 * action
        return jnp.where(
            (jnp.abs(place) > 3).any(1, keepdims=True), jax.random.uniform(key, place.shape), place
        )

    def step(state: Any, place: jax.Array, key: jax.Array) -> Any:
        def iteration(carry: Any, key: jax.Array) -> Any:
            weights, moments, place = carry

            def act(place: jax.Array, key: jax.Array) -> Any:
                noise, again = jax.random.split(key)
                action = mlp(weights["policy"], place) + 0.1 * jax.random.uniform(
                    noise, place.shape
                )
                after = moved(place, action, again)
                reward = -(after**2).sum(1)
                return lax.cond(reward[0] < -9, jnp.zeros_like, lambda x: x, after), (
                    place,
                    action,
                    reward,
                )

            place, (places, actions, rewards) = lax.scan(act, place, jax.random.split(key, 4))
            values = mlp(weights["value"], places).mean(-1)
            _, returns = lax.scan(
                lambda after, reward: (reward + 0.9 * after,) * 2, values[-1], rewards, reverse=True
            )
            gains = returns - values

            def update(carry: Any, _: None) -> Any:
                weights, moments = carry

                def loss(weights: Any) -> jax.Array:
                    distance = ((mlp(weights["policy"], places) - actions) ** 2).sum(-1)
                    ratio = jnp.clip(jnp.exp(-distance), 0.8, 1.2)
                    return (
                        -(ratio * gains).mean()
                        + ((mlp(weights["value"], places).mean(-1) - returns) ** 2).mean()
                    )

                value, gradients = jax.value_and_grad(loss)(weights)
                updates, moments = optimizer.update(gradients, moments)
                return (optax.apply_updates(weights, updates), moments), value

            (weights, moments), values = lax.scan(update, (weights, moments), length=2)
            return (weights, moments, place), values.mean()

        (*state, place), losses = lax.scan(iteration, (*state, place), jax.random.split(key, 2))
        return state, place, losses

    weights = {"policy": layers(2, WIDTH), "value": layers(2, WIDTH, seed=5)}
    return step, ((weights, optimizer.init(weights)), normal(256, WIDTH, seed=9), jax.random.key(1))


def learned_to_learn() -> Made:
    """A few steps of descent for each task, differentiated: a scan of tasks around an inner loop and its gradient."""

    def step(state: Any, x: jax.Array) -> Any:
        def adapted(state: Any, rows: jax.Array) -> jax.Array:
            weights, rate = state

            def inner(_: int, fast_weights: Any) -> Any:
                return jax.tree.map(
                    lambda a, b: a - rate * b, fast_weights, jax.grad(square)(fast_weights, rows)
                )

            return square(lax.fori_loop(0, 2, inner, weights), rows[::-1])

        def task(total: Any, rows: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(adapted)(state, rows)
            return jax.tree.map(jnp.add, total, gradients), value

        gradients, values = lax.scan(task, jax.tree.map(jnp.zeros_like, state), x)
        return descended(state, gradients, 0.01), values

    return step, ((layers(2, WIDTH), jnp.float32(0.1)), normal(3, ROWS, WIDTH, seed=9))


@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(shuffled_epochs, 0.7, marks=pytest.mark.slow),
        (counted_slices, 0.7),
        (until_it_is_small, 0.7),
        pytest.param(rollouts_and_updates, 0.8, marks=pytest.mark.slow),
        pytest.param(learned_to_learn, 0.8, marks=pytest.mark.slow),
    ],
)
def test_steps_in_a_loop_keep_their_bits(make: Make, share: float) -> None:
    run = within_share(share, *make(), split=False, donate_argnums=0)
    assert_same(run.planned.compile()(*make()[1]), run.plain(*make()[1]), run)
