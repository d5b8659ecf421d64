"""A step `(weights, x) -> (weights, loss)` in a branch, in the body of a loop, in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Step = Callable[[Any, jax.Array], Any]


def in_a_branch(step: Step) -> Step:
    """The one that is taken; the other gives the weights back."""

    def idle(weights: Any, x: jax.Array) -> Any:
        loss = jax.eval_shape(step, weights, x)[1]
        return weights, jnp.zeros(loss.shape, loss.dtype)

    return lambda weights, x: jax.lax.cond(x[0, 0] < jnp.inf, step, idle, weights, x)


def in_a_body(step: Step) -> Step:
    """Three trips, each with a batch of its own."""
    trips = jnp.arange(3) * 1e-3
    return lambda weights, x: jax.lax.scan(
        lambda weights, trip: step(weights, x + trip), weights, trips
    )


WITHIN: Mapping[str, Callable[[Step], Step]] = {
    "branch": in_a_branch,
    "body": in_a_body,
    "body, branch, body": lambda step: in_a_body(in_a_branch(in_a_body(step))),
}
