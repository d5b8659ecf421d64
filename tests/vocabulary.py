"""A training step whose logits are most of its memory, and fit in slabs of tokens; tests of several rooms plan it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

TOKENS, WIDTH, WORDS = 2048, 64, 512
LOGITS_BYTES = 4 * TOKENS * WORDS
IN_SLABS = 2 * 2**20  # a budget that no order of whole kernels keeps, and slabs do


def step(weights: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient descent on the cross entropy over the words; the new weights and the loss."""

    def loss(weights: Any) -> jax.Array:
        layer, head = weights
        logits = jnp.tanh(x @ layer) @ head
        own = (logits * jax.nn.one_hot(labels, WORDS)).sum(axis=1)
        return (jax.nn.logsumexp(logits, axis=1) - own).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def arguments(tokens: int = TOKENS) -> tuple[Any, jax.Array, jax.Array]:
    weights = [
        jnp.cos(jnp.arange(1.0 * WIDTH * size)).reshape(WIDTH, size) / 8 for size in (WIDTH, WORDS)
    ]
    return (
        weights,
        jnp.sin(jnp.arange(1.0 * tokens * WIDTH)).reshape(tokens, WIDTH),
        jnp.arange(tokens) % WORDS,
    )


def shapes(tokens: int = TOKENS) -> Any:
    return jax.eval_shape(lambda: arguments(tokens))
