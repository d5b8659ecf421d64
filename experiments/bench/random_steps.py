"""Random training steps, each generated from its number.

A step is a chain of layers of a dozen kinds, in one of three precisions, with one of three
optimizers. None has a loop, since stacking other residuals changes the kernels.
`tests/test_numbers.py` generates small programs of every kind with any budget, of which 2 in 100
recompute a kernel. The steps here are large enough that 96 in 100 do.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Array = jax.Array
Layer = Callable[[Any, Array, Array, Array], Array]
"""(weights, output of the previous layer, output of an earlier layer, key) -> (rows, width)."""


def _normalized(weights: Any, x: Array, early: Array, key: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(1, keepdims=True)) * lax.rsqrt(wide.var(1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * (1 + weights["bias"])


def _attention(weights: Any, x: Array, early: Array, key: Array) -> Array:
    tokens = x.reshape(-1, 32, x.shape[1])
    scores = (tokens @ weights["in"]) @ tokens.swapaxes(1, 2) * x.shape[1] ** -0.5
    return x + (jax.nn.softmax(scores) @ tokens).reshape(x.shape) @ weights["out"]


def _convolved(weights: Any, x: Array, early: Array, key: Array) -> Array:
    kernel = jnp.stack([weights["in"], weights["out"], weights["in"]])
    signal = x.reshape(-1, 32, x.shape[1])
    convolved = lax.conv_general_dilated(
        signal, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jax.nn.relu(convolved).reshape(x.shape)


def _pooled(weights: Any, x: Array, early: Array, key: Array) -> Array:
    signal = x.reshape(-1, 32, x.shape[1])
    maxima = lax.reduce_window(signal, -jnp.inf, lax.max, (1, 4, 1), (1, 4, 1), "VALID")
    return jnp.repeat(maxima, 4, axis=1).reshape(x.shape) @ weights["in"] + x


LAYERS: Mapping[str, Layer] = {
    "dense": lambda w, x, early, key: jnp.tanh(x @ w["in"] + w["bias"]),
    "residual": lambda w, x, early, key: x + jax.nn.gelu(x @ w["in"]) @ w["out"],
    "gated": lambda w, x, early, key: jax.nn.silu(x @ w["in"]) * (x @ w["out"]),
    "normalized": _normalized,
    "over batch": lambda w, x, early, key: jax.nn.relu(
        (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-2) + w["bias"]
    ),
    "attention": _attention,
    "convolved": _convolved,
    "pooled": _pooled,
    "joined": lambda w, x, early, key: (
        jnp.concatenate([x, early], 1) @ jnp.concatenate([w["in"], w["out"]])
    ),
    "dropped": lambda w, x, early, key: (
        jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / jnp.asarray(0.7, x.dtype), 0) + early
    ),
    "masked": lambda w, x, early, key: jnp.where(early > 0, jnp.sin(x @ w["in"]), x * w["bias"]),
    "moved": lambda w, x, early, key: (
        jnp.cumsum(jnp.flip(x, 1) * jnp.asarray(0.1, x.dtype), 1) + jnp.roll(early, 1, 0) @ w["in"]
    ),
    "chosen": lambda w, x, early, key: lax.cond(
        x[0, 0] > 0, lambda x: jnp.tanh(x @ w["in"]), lambda x: x @ w["out"], x
    ),
}


def drawn_step(number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step and its arguments: a state (weights, moments, key) and a batch."""
    draw = random.Random(number)
    dtype = draw.choice((jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16))
    rows, width = draw.choice((128, 256)), draw.choice((16, 24, 32))
    optimizer = draw.choice((optax.sgd(1e-2), optax.sgd(1e-2, momentum=0.9), optax.adam(1e-3)))
    kinds = [draw.choice(list(LAYERS)) for _ in range(draw.randint(3, 5))]
    skips = [draw.randint(0, number) for number in range(len(kinds))]

    def loss(weights: Any, key: Array, batch: Array) -> Array:
        outputs = [batch.astype(dtype)]
        for kind, skip, weight in zip(kinds, skips, weights, strict=True):
            key, subkey = jax.random.split(key)
            weight = jax.tree.map(lambda leaf: leaf.astype(dtype), weight)
            outputs.append(LAYERS[kind](weight, outputs[-1], outputs[skip], subkey))
        return (outputs[-1].astype(jnp.float32) ** 2).mean()

    def step(state: Any, batch: Array) -> Any:
        weights, moments, key = state
        key, used = jax.random.split(key)
        value, gradient = jax.value_and_grad(loss)(weights, used, batch)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(weights, updates), moments, key), value

    key, first, second = jax.random.split(jax.random.key(number), 3)
    square = jax.random.normal(first, (len(kinds), 2, width, width)) * 0.5 * width**-0.5
    weights = [{"in": pair[0], "out": pair[1], "bias": pair[0, 0]} for pair in square]
    batch = jax.random.normal(second, (rows, width))
    return step, ((weights, optimizer.init(weights), key), batch)
