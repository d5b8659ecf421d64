"""Training steps with work of their own in branches, which are planned as the rest is."""

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


def skipped_if_not_finite() -> Made:
    """Mixed-precision training with a loss scale: three conditions, one in the other, on what was computed."""
    optimizer = optax.adam(1e-2)

    def step(state: Any, x: jax.Array) -> Any:
        weights, moments, scale, good = state

        def loss(weights: Any) -> jax.Array:
            halves = [weight.astype(jnp.bfloat16) for weight in weights]
            return (mlp(halves, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean() * scale

        def stepped() -> Any:
            value, gradients = jax.value_and_grad(loss)(weights)
            finite = jnp.all(jnp.stack([jnp.isfinite(gradient).all() for gradient in gradients]))

            def updated() -> Any:
                updates, new = optimizer.update(
                    [gradient / scale for gradient in gradients], moments
                )
                grown = lax.cond(good >= 2, lambda: (scale * 2, 0), lambda: (scale, good + 1))
                return optax.apply_updates(weights, updates), new, *grown

            return lax.cond(finite, updated, lambda: (weights, moments, scale / 2, 0)), value

        return lax.cond(jnp.isfinite(x).all(), stepped, lambda: (state, jnp.float32(jnp.nan)))

    weights = layers(6, WIDTH)
    return step, (
        (weights, optimizer.init(weights), jnp.float32(1024.0), 2),
        normal(ROWS, WIDTH, seed=9),
    )


def penalized_every_other_step() -> Made:
    """A GAN whose critic is regularized lazily: the gradient's norm is differentiated in a branch."""

    def critic(weights: Any, x: jax.Array) -> jax.Array:
        return mlp(weights, x).sum(1)

    def step(state: Any, real: jax.Array, noise: jax.Array) -> Any:
        maker, judge, count = state

        def judges(judge: Any) -> jax.Array:
            fake = lax.stop_gradient(mlp(maker, noise))
            return (
                jax.nn.softplus(critic(judge, fake)).mean()
                + jax.nn.softplus(-critic(judge, real)).mean()
            )

        def penalty(judge: Any) -> jax.Array:
            return (jax.grad(lambda x: critic(judge, x).sum())(real) ** 2).sum(1).mean()

        value, gradients = jax.value_and_grad(judges)(judge)
        none = (jnp.float32(0), jax.tree.map(jnp.zeros_like, gradients))
        more, penalty_gradients = lax.cond(
            count % 2 == 0, jax.value_and_grad(penalty), lambda _: none, judge
        )
        judge = descended(judge, jax.tree.map(jnp.add, gradients, penalty_gradients))
        lost, gradients = jax.value_and_grad(
            lambda maker: jax.nn.softplus(-critic(judge, mlp(maker, noise))).mean()
        )(maker)
        return (descended(maker, gradients), judge, count + 1), (value, more, lost)

    state = layers(3, WIDTH), layers(3, WIDTH, seed=5), 0
    return step, (state, normal(ROWS, WIDTH, seed=8), normal(ROWS, WIDTH, seed=9))


def alternating() -> Made:
    """Two optimizers take turns, each in a branch of one `switch` whose third only measures; all return both states."""
    optimizers = optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)

    def step(state: Any, x: jax.Array, turn: jax.Array) -> Any:
        def loss(both: Any) -> jax.Array:
            return ((mlp(both[1], mlp(both[0], x)) - x) ** 2).mean()

        def trained(which: int) -> Any:
            def branch(state: Any) -> Any:
                both, moments = state
                value, gradients = jax.value_and_grad(
                    lambda network: loss([*both[:which], network, *both[which + 1 :]])
                )(both[which])
                updates, new = optimizers[which].update(gradients, moments[which])
                both = [
                    *both[:which],
                    optax.apply_updates(both[which], updates),
                    *both[which + 1 :],
                ]
                return (both, [*moments[:which], new, *moments[which + 1 :]]), value

            return branch

        return lax.switch(
            turn, [trained(0), trained(1), lambda state: (state, loss(state[0]))], state
        )

    both = [layers(3, WIDTH), layers(3, WIDTH, seed=5)]
    state = (
        both,
        [optimizer.init(weights) for optimizer, weights in zip(optimizers, both, strict=True)],
    )
    return step, (state, normal(ROWS, WIDTH, seed=9), 1)


def experts_by_a_switch() -> Made:
    """The data choose a path for each block of rows: branches with residuals of their own, differentiated in a scan."""

    def expert(weights: Any, kind: int) -> Any:
        return lambda x: x + (jnp.sin, jnp.tanh)[kind](x @ weights)

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def block(total: jax.Array, rows: jax.Array) -> Any:
                for number, layer in enumerate(weights):
                    paths = [expert(weight, kind) for kind, weight in enumerate(layer)]
                    rows = lax.switch((rows[number, 0] * 8).astype(jnp.int32) % 2, paths, rows)
                return total + (rows**2).mean(), rows.mean()

            return lax.scan(block, jnp.float32(0), x)[0]

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    weights = [layers(2, WIDTH, seed=2 * layer) for layer in range(2)]
    return step, (weights, normal(3, ROWS, WIDTH, seed=9))


def searched_for_a_rate() -> Made:
    """Backtracking: a bounded `while_loop` whose body asks a condition, around losses of all the data."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return ((mlp(weights, x) - jnp.sin(x)) ** 2).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)

        def body(carry: Any) -> Any:
            rate, _, tried = carry
            trial_loss = loss(descended(weights, gradients, rate), x)
            return lax.cond(
                trial_loss < value,
                lambda: (rate, True, tried),
                lambda: (rate / 2, False, tried + 1),
            )

        rate, success, _ = lax.while_loop(
            lambda carry: ~carry[1] & (carry[2] < 4), body, (jnp.float32(8), False, 0)
        )
        return (
            lax.cond(success, lambda: descended(weights, gradients, rate), lambda: weights),
            value,
            rate,
        )

    return step, (layers(5, WIDTH), normal(ROWS, WIDTH, seed=9))


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (skipped_if_not_finite, 0.5),
        pytest.param(penalized_every_other_step, 0.8, marks=pytest.mark.slow),
        pytest.param(alternating, 0.75, marks=pytest.mark.slow),
        pytest.param(experts_by_a_switch, 0.8, marks=pytest.mark.slow),
        (searched_for_a_rate, 0.75),
    ],
)
def test_a_step_with_branches_keeps_its_bits(make: Make, share: float) -> None:
    run = within_share(share, *make(), split=False, donate_argnums=0)
    assert_same(run.planned.compile()(*make()[1]), run.plain(*make()[1]), run)
