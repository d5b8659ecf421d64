"""Arrays that a step closes over instead of taking them: XLA's constants, which are counted and planned around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.cases.within_share import Step, assert_same, descended, layers, mlp, normal, within_share

WIDTH, ROWS = 32, 2048
DATA = np.asarray(normal(ROWS, WIDTH, seed=9))


def trained(loss: Callable[[Any], jax.Array]) -> Step:
    def step(weights: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    return step


def by_a_nested_jit() -> tuple[Step, int]:
    """A jax array in a function that is jitted by itself, called twice: once as a closure, once as a partial."""
    x = jnp.asarray(DATA)
    features = jax.jit(lambda weights, scale: mlp(weights, scale * x))
    return trained(
        lambda weights: (
            features(weights, 1.0) * jax.jit(lambda y: y + x)(features(weights, 0.5))
        ).mean()
    ), DATA.nbytes


def by_the_body_of_a_scan() -> tuple[Step, int]:
    """The same in every trip, forward and backward; of a loop, XLA carries it."""
    layer = lambda y, weight: (jnp.tanh((y + DATA) @ weight), None)  # noqa: E731
    return trained(
        lambda weights: (lax.scan(layer, jnp.zeros(DATA.shape), jnp.stack(weights))[0] ** 2).mean()
    ), DATA.nbytes


def in_bfloat16() -> tuple[Step, int]:
    """Weights are cast to the type of the data."""
    halves = jnp.asarray(DATA, jnp.bfloat16)

    def loss(weights: Any) -> jax.Array:
        y = mlp([weight.astype(jnp.bfloat16) for weight in weights], halves)
        return ((y - halves).astype(jnp.float32) ** 2).mean()

    return trained(loss), halves.nbytes


def by_branches() -> tuple[Step, int]:
    """A table of each branch, of which rows are gathered by integers that are closed over, too."""
    tables, index = [DATA, DATA[::-1] * 2], np.random.default_rng(3).integers(0, ROWS, ROWS)

    def loss(weights: Any) -> jax.Array:
        rows = [lambda table=table: jnp.asarray(table)[index] for table in tables]
        return (mlp(weights, lax.cond(weights[0][0, 0] > 0, *rows)) ** 2).mean()

    return trained(loss), 2 * DATA.nbytes


def by_a_gradient_rule() -> tuple[Step, int]:
    """A mask of bytes, of a `custom_vjp` and of a `jax.checkpoint`, under `vmap`."""
    mask = DATA > 0

    @jax.custom_vjp
    def masked(y: jax.Array) -> jax.Array:
        return jnp.where(mask, y, 0)

    masked.defvjp(
        lambda y: (masked(y), None),
        lambda _, cotangent: (jnp.where(mask, cotangent, 0.1 * cotangent),),
    )

    def loss(weights: Any) -> jax.Array:
        remade = jax.checkpoint(lambda weights, scale: mlp(weights, scale * mask))
        return (
            jax.vmap(lambda scale: masked(remade(weights, scale)))(jnp.arange(1.0, 3.0)) ** 2
        ).mean()

    return trained(loss), mask.nbytes


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (by_a_nested_jit, 0.75),
        (by_the_body_of_a_scan, 0.75),
        pytest.param(in_bfloat16, 0.75, marks=pytest.mark.slow),
        (by_branches, 0.85),
        pytest.param(by_a_gradient_rule, 0.75, marks=pytest.mark.slow),
    ],
)
def test_what_is_closed_over_is_planned_around(
    make: Callable[[], tuple[Step, int]], share: float
) -> None:
    step, nbytes = make()
    weights = layers(5, WIDTH)
    run = within_share(share, step, (weights,), closed_over=nbytes, split=False)
    assert run.planned.report.constant_bytes >= nbytes
    assert_same(run.planned.compile()(weights), run.plain(weights), run)
