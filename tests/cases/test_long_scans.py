"""Scans over time, differentiated: their stacks are most of what the step takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.cases.within_share import Made, Make, assert_same, descended, normal, within_share

WIDTH, ROWS, TRIPS = 16, 64, 48


def read_both_ways() -> Made:
    """A gated recurrent network over a sequence, forwards and backwards, that predicts at every time."""

    def cell(weights: Any, h: jax.Array, x: jax.Array) -> Any:
        update, new = jnp.split(jnp.concatenate([x, h], 1) @ weights, 2, 1)
        h = h + jax.nn.sigmoid(update) * (jnp.tanh(new) - h)
        return h, h

    def step(weights: Any, xs: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            start = jnp.zeros(xs.shape[1:])
            _, forward = lax.scan(lambda h, x: cell(weights["there"], h, x), start, xs)
            _, back = lax.scan(lambda h, x: cell(weights["back"], h, x), start, xs, reverse=True)
            return ((forward[:-1] + back[:-1] - xs[1:]) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    sides = {
        side: normal(2 * WIDTH, 2 * WIDTH, seed=seed, scale=0.2)
        for seed, side in enumerate(("there", "back"))
    }
    return step, (sides, normal(TRIPS, ROWS, WIDTH, seed=9))


def inverted_wave() -> Made:
    """The medium of a wave from what receivers measure at all times; carries two fields and a counter."""

    def step(speed: jax.Array, records: jax.Array) -> Any:
        def loss(speed: jax.Array) -> jax.Array:
            def trip(carry: Any, measured: jax.Array) -> Any:
                before, field, count = carry
                bend = (
                    sum(jnp.roll(field, by, axis) for axis in (0, 1) for by in (-1, 1)) - 4 * field
                )
                after = (2 * field - before + speed**2 * bend).at[8, 8].add(jnp.sin(count / 4))
                return (field, after, count + 1), ((after[:, 3] - measured) ** 2).sum()

            still = jnp.zeros((ROWS, WIDTH))
            return lax.scan(trip, (still, still, 0), records)[1].sum()

        value, gradient = jax.value_and_grad(loss)(speed)
        return speed - 1e-3 * gradient, value

    return step, (0.4 + normal(ROWS, WIDTH, scale=0.02), normal(TRIPS, ROWS, seed=9))


def neural_ode() -> Made:
    """Heun's method in time, with a regularizer on the way; the time itself is carried."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def slope(x: jax.Array, time: jax.Array) -> jax.Array:
                return jnp.tanh(x @ weights[0] + time) @ weights[1]

            def trip(carry: Any, _: None) -> Any:
                x, time, energy = carry
                first = slope(x, time)
                change = (first + slope(x + first / 8, time + 1 / 8)) / 16
                return (x + change, time + 1 / 8, energy + (change**2).mean()), None

            x_end, _, energy = lax.scan(trip, (x, 0.0, 0.0), length=TRIPS)[0]
            return ((x_end - jnp.sin(x)) ** 2).mean() + energy

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    return step, (
        (normal(WIDTH, 32, scale=0.2), normal(32, WIDTH, seed=1, scale=0.2)),
        normal(ROWS, WIDTH, seed=9),
    )


def noisy_paths() -> Made:
    """A stochastic equation: each trip draws noise from a key that it carries; paths stop by a condition."""

    def step(weights: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def trip(carry: Any, time: jax.Array) -> Any:
                x, key = carry
                key, subkey = jax.random.split(key)
                noise = jax.random.uniform(subkey, x.shape) - 0.5
                moved = x + 0.1 * jnp.tanh(x @ weights + time) + 0.1 * noise
                return (lax.cond((x**2).mean() < 4, lambda: moved, lambda: x), key), x.mean()

            (x_end, _), means = lax.scan(trip, (x, key), jnp.linspace(0, 1, TRIPS))
            return (x_end**2).mean() + (means**2).sum()

        value, gradient = jax.value_and_grad(loss)(weights)
        return descended(weights, gradient), value

    return step, (normal(WIDTH, WIDTH, scale=0.2), normal(ROWS, WIDTH, seed=9), jax.random.key(1))


def layers_over_time() -> Made:
    """A stacked recurrent network: a scan of layers around scans over time."""

    def step(weights: Any, xs: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def layer(xs: jax.Array, weight: Any) -> Any:
                def trip(h: jax.Array, x: jax.Array) -> Any:
                    h = jnp.tanh(x @ weight["in"] + h @ weight["own"])
                    return h, h + x

                end, ys = lax.scan(trip, jnp.zeros(xs.shape[1:]), xs)
                return ys, end.mean()

            ys, ends = lax.scan(layer, xs, weights)
            return (ys**2).mean() + ends.sum()

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    weights = {
        "in": normal(3, WIDTH, WIDTH, scale=0.2),
        "own": normal(3, WIDTH, WIDTH, seed=1, scale=0.2),
    }
    return step, (weights, normal(TRIPS, ROWS, WIDTH, seed=9))


@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(read_both_ways, 0.6, marks=pytest.mark.slow),
        (inverted_wave, 0.6),
        pytest.param(neural_ode, 0.4, marks=pytest.mark.slow),
        (noisy_paths, 0.6),
        pytest.param(layers_over_time, 0.75, marks=pytest.mark.slow),
    ],
)
def test_a_scan_over_time_gives_the_same_numbers(make: Make, share: float) -> None:
    """Other residuals come with other kernels. In float64, a wrong order of trips cannot pass for rounding."""
    with jax.enable_x64(True):
        run = within_share(share, *make(), split=False)
        stacks = [row for row in run.planned.report.decisions if "trips" in row.name]
        assert stacks and all(row.source.startswith("tests/cases/") for row in stacks)
        assert_same(run.planned.compile()(*make()[1]), run.plain(*make()[1]), run)
