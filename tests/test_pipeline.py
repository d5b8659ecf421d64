"""Which candidates a budget brings about, compiled for described GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan

WIDTH, ROWS, LAYERS, BUDGET = 2048, 16384, 8, 823_000_000


def step(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A chain of large products: each takes longer than a copy of its result over a fast link."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return (y * y).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def report(host_budget: Any) -> Any:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    args = weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    planned = memplan.jit(step, device="v100", budget=BUDGET, host_budget=host_budget, donate_argnums=0)
    return planned.plan(*args).report


@pytest.mark.gpu_aot
def test_values_move_where_their_copies_overlap_and_that_is_the_fastest() -> None:
    """Counted in full, the copies would take longer than computing again: the planner alone would not move them."""
    allowed, forbidden = report(None), report(0)
    assert allowed.status == forbidden.status == "fits"
    assert allowed.offloaded_bytes > 0 == forbidden.offloaded_bytes
    assert allowed.predicted_step_s < forbidden.predicted_step_s
