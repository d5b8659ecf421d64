"""Steps dominated by one long `lax.scan`, plain or with two levels of `jax.checkpoint`."""

from collections.abc import Callable
from functools import partial
from math import comb
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.steps import F32

Body = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, slice) -> (carry, result), the body of a `lax.scan`."""
StepWithShapes = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and the shapes of its arguments."""


def scanned(body: Body, carry: Any, slices: Any, trips: int, inner: int) -> Any:
    """The carry after `trips` trips; `inner` > 0: in checkpointed segments of `inner` trips."""
    if not inner:
        return jax.lax.scan(body, carry, slices, length=trips)[0]
    segment = jax.checkpoint(lambda carry, slices: jax.lax.scan(body, carry, slices, length=inner))
    segments = jax.tree.map(
        lambda leaf: leaf.reshape(trips // inner, inner, *leaf.shape[1:]), slices
    )
    return jax.lax.scan(segment, carry, segments, length=trips // inner)[0]


def wave(inner: int = 0, trips: int = 300, rows: int = 2000, columns: int = 400) -> StepWithShapes:
    """A rollout of a nonlinear 2D wave, differentiated by one parameter of the medium."""

    def step(decay: jax.Array) -> Any:
        def loss(decay: jax.Array) -> jax.Array:
            def body(carry: Any, _: None) -> tuple[Any, None]:
                u, speed, w = carry
                near = (
                    jnp.roll(u, 1, 0)
                    + jnp.roll(u, -1, 0)
                    + jnp.roll(u, 1, 1)
                    + jnp.roll(u, -1, 1)
                    - 4 * u
                )
                w = w + 0.1 * jnp.tanh(near) * speed
                return (u + 0.1 * w, speed * jnp.exp(-(w**2) * decay), w), None

            flat = jnp.zeros((rows, columns))
            ends = scanned(body, (flat + decay, flat + 1, flat), None, trips, inner)
            return jnp.stack([jnp.sum(part**2) for part in ends]).sum()

        return jax.value_and_grad(loss)(decay)

    return step, (jax.ShapeDtypeStruct((), F32),)


def gru(inner: int = 0, trips: int = 1000, batch: int = 256, width: int = 512) -> StepWithShapes:
    """A gated recurrent network over a sequence."""

    def step(weights: Any, xs: jax.Array, y: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def body(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
                update, reset = (
                    jax.nn.sigmoid(x @ weights[f"{gate}_x"] + h @ weights[f"{gate}_h"])
                    for gate in ("update", "reset")
                )
                new = jnp.tanh(x @ weights["new_x"] + (reset * h) @ weights["new_h"])
                return (1 - update) * h + update * new, None

            return jnp.square(scanned(body, jnp.zeros((batch, width)), xs, trips, inner) - y).mean()

        return jax.value_and_grad(loss)(weights)

    names = [f"{gate}_{of}" for gate in ("update", "reset", "new") for of in "xh"]
    weights = {name: jax.ShapeDtypeStruct((width, width), F32) for name in names}
    return step, (
        weights,
        jax.ShapeDtypeStruct((trips, batch, width), F32),
        jax.ShapeDtypeStruct((batch, width), F32),
    )


def neural_ode(
    inner: int = 0, trips: int = 500, batch: int = 4096, width: int = 256, hidden: int = 1024
) -> StepWithShapes:
    """The classical Runge-Kutta method over a perceptron with one hidden layer."""

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def slope(x: jax.Array) -> jax.Array:
                return jnp.tanh(x @ weights[0]) @ weights[1]

            def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                first = slope(x)
                second = slope(x + first / (2 * trips))
                third = slope(x + second / (2 * trips))
                last = slope(x + third / trips)
                return x + (first + 2 * second + 2 * third + last) / (6 * trips), None

            return jnp.square(scanned(body, x, None, trips, inner) - y).mean()

        return jax.value_and_grad(loss)(weights)

    weights = jax.ShapeDtypeStruct((width, hidden), F32), jax.ShapeDtypeStruct((hidden, width), F32)
    rows = jax.ShapeDtypeStruct((batch, width), F32)
    return step, (weights, rows, rows)


def decoder(
    inner: int = 0, trips: int = 48, batch: int = 8, tokens: int = 1024, width: int = 1024
) -> StepWithShapes:
    """A decoder with its layers as one scan; SGD."""
    heads = width // 64

    def norm(x: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        projected = (norm(x) @ weights["attention"]).reshape(batch, tokens, 3, heads, 64)
        query, key, value = jnp.moveaxis(projected, (2, 3), (0, 2))
        scores = jnp.where(jnp.tri(tokens, dtype=bool), query @ key.swapaxes(-1, -2) / 8, -1e9)
        mixed = (jax.nn.softmax(scores) @ value).swapaxes(1, 2).reshape(batch, tokens, width)
        x = x + mixed @ weights["output"]
        return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"], None

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return jnp.square(scanned(layer, x, weights, trips, inner) - y).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, gradient), value

    sides = {"attention": (1, 3), "output": (1, 1), "up": (1, 4), "down": (4, 1)}
    weights = {
        name: jax.ShapeDtypeStruct((trips, a * width, b * width), F32)
        for name, (a, b) in sides.items()
    }
    rows = jax.ShapeDtypeStruct((batch, tokens, width), F32)
    return step, (weights, rows, rows)


LONG_SCANS = {
    "wave": (wave, 300),
    "gru": (gru, 1000),
    "neural_ode": (neural_ode, 500),
    "decoder": (decoder, 48),
}
"""Name -> step, and the trips of its loop."""


def nested(
    make: Callable[..., StepWithShapes], trips: int
) -> dict[int, Callable[[], StepWithShapes]]:
    """Trips of a segment -> the step with two levels of `jax.checkpoint`."""
    return {inner: partial(make, inner) for inner in range(2, trips // 2 + 1) if not trips % inner}


def revolve_trips(trips: int, snapshots: int) -> int:
    """The fewest forward trips of a step, including repeated ones, given a number of snapshots.

    Griewank and Walther, ACM TOMS 26(1), 2000: `r * trips - C(snapshots + r, r - 1)` trips besides
    the last run of each, with the smallest `r` such that `C(snapshots + r, r)` reaches `trips`.
    """
    repeats = next(r for r in range(1, trips + 1) if comb(snapshots + r, r) >= trips)
    return trips + repeats * trips - comb(snapshots + repeats, repeats - 1)
