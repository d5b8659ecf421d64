"""A training step of this corpus, and what its builders share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Make = Callable[[Callable[[], Any]], Any]
"""Calls a function without arguments for its arrays, or for their shapes (`jax.eval_shape`)."""


class TrainingStep(NamedTuple):
    """A step and its arguments."""

    step: Callable[..., Any]  # a function of trees of arrays
    args: tuple[Any, ...]  # arrays or `jax.ShapeDtypeStruct`s
    donate_argnums: tuple[int, ...]  # positions of the state


def of_one_replica(step: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """A data-parallel step on a single device: the axis of its replicas has length one."""

    def alone(*args: Any) -> Any:
        replicas = jax.vmap(
            lambda _, args: step(*args), in_axes=(0, None), out_axes=None, axis_name=axis
        )
        return replicas(jnp.zeros(1), args)

    return alone


def images(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal noise."""
    return jax.random.normal(jax.random.key(1), shape, dtype)


def integers(*shape: int, below: int, low: int = 0, seed: int = 2) -> jax.Array:
    """Labels, or tokens; `low=1` avoids padding tokens."""
    return jax.random.randint(jax.random.key(seed), shape, low, below)
