"""Steps of training whose modules have what planning meets: loops, branches, windows, updates in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import optax

Step = Callable[..., Any]


def dense(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """Training of equal layers with momentum; (params, momentum), batch."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return (y**2).mean()

        weights, momentum = state
        value, gradient = jax.value_and_grad(loss)(weights)
        updates, momentum = optimizer.update(gradient, momentum)
        return (optax.apply_updates(weights, updates), momentum), value

    weights = [
        jnp.cos(jnp.arange(width * width, dtype=jnp.float32) + i).reshape(width, width) / 8
        for i in range(layers)
    ]
    return step, (
        (weights, optimizer.init(weights)),
        jnp.sin(jnp.arange(8.0 * width * width)).reshape(8 * width, width),
    )


def scanned(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """The same by a scan, with a table that is updated in place."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(
                lambda y, weight: (jnp.tanh(y @ weight) + jnp.sin(y), None), x, weights
            )
            return (y**2).mean()

        weights, table = state
        value, gradient = jax.value_and_grad(loss)(weights)
        return (weights - 0.1 * gradient, table.at[3].set(value)), value

    weights = (
        jnp.cos(jnp.arange(layers * width * width, dtype=jnp.float32)).reshape(layers, width, width)
        / 8
    )
    return step, (
        (weights, jnp.zeros(64)),
        jnp.sin(jnp.arange(8.0 * width * width)).reshape(8 * width, width),
    )


def branching(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """A condition before and after layers that may run again."""

    def step(state: Any, x: jax.Array) -> Any:
        weights, count = state

        def loss(weights: jax.Array) -> jax.Array:
            y = jax.lax.cond(
                count[0] % 2 == 0, lambda x: jnp.sin(x) @ weights[0], lambda x: x @ weights[1].T, x
            )
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jax.lax.cond(y[0, 0] > 0, lambda y: (y**2).mean(), lambda y: y.sum(), y)

        value, gradient = jax.value_and_grad(loss)(weights)
        return (weights - 0.1 * gradient, count + 1), value

    _, ((weights, _), x) = scanned(width, layers)
    return step, ((weights, jnp.zeros(1, jnp.int32)), x)


def accumulating(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """Gradients summed over parts of the batch, each with a step of its own in a loop's body."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: list[jax.Array], part: jax.Array) -> jax.Array:
            y = part
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return (y**2).mean()

        def one(total: tuple[Any, jax.Array], part: jax.Array) -> tuple[Any, None]:
            value, gradient = jax.value_and_grad(loss)(weights, part)
            return (jax.tree.map(jnp.add, total[0], gradient), total[1] + value), None

        weights, count = state
        nothing = jax.tree.map(jnp.zeros_like, weights)
        (gradient, value), _ = jax.lax.scan(one, (nothing, jnp.float32(0)), x.reshape(4, -1, width))
        return (
            [weight - 0.1 * change for weight, change in zip(weights, gradient, strict=True)],
            count + 1,
        ), value

    _, ((weights, _), x) = dense(width, layers)
    return step, ((weights, jnp.zeros(1)), jnp.concatenate([x, x]))


def pooling(width: int, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """Largest values of windows, whose gradients XLA makes by one operation with results that nobody reads."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x.reshape(8, 16, -1, width)
            for weight in weights[:2]:
                y = jnp.tanh(y @ weight)
                y = jax.lax.reduce_window(
                    y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
                )
            return (y**2).mean()

        value, gradient = jax.value_and_grad(loss)(state)
        return [
            weight - 0.1 * change for weight, change in zip(state, gradient, strict=True)
        ], value

    _, ((weights, _), x) = dense(width, layers)
    return step, (weights, x)


def updating(seed: int) -> tuple[Step, tuple[Any, ...]]:
    """Training of what gathers, scatters and updates slices, as the seed has it: places of many equal sizes."""
    random = Random(seed)
    width, layers = random.choice((64, 128)), random.randint(3, 6)
    kinds, rows = (
        random.choices(["product", "sum", "slice", "rows"], k=layers),
        random.choice((512, 1024)),
    )
    sources = [random.randint(0, layer) for layer in range(layers)]

    def layer(kind: str, h: jax.Array, weight: jax.Array, index: jax.Array) -> jax.Array:
        product = h @ weight
        if kind == "product":
            return jnp.tanh(product)
        if kind == "sum":
            return h * jax.ops.segment_sum(jnp.sin(product[index]), index, rows)
        if kind == "slice":
            return jax.lax.dynamic_update_slice(jnp.tanh(h), jnp.sin(product[:64]), (1, 0))
        return h.at[index].add(jnp.cos(product[index]))

    def step(weights: list[jax.Array], x: jax.Array, index: jax.Array) -> Any:
        def loss(weights: list[jax.Array]) -> jax.Array:
            values = [x]
            for kind, source, weight in zip(kinds, sources, weights, strict=True):
                values.append(layer(kind, values[source], weight, index))
            return jnp.stack([(value**2).mean() for value in values]).sum()

        return jax.tree.map(lambda old, g: old - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    return step, (
        weights,
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


def passing(seed: int) -> tuple[Step, tuple[Any, ...]]:
    """Conditionals in a row, some of whose branches pass on what they are given; with gradients.

    What another branch computes is written where the operand was, while values that outlive the
    conditional need memory of their own.
    """
    random = Random(seed)
    kinds = [random.choice(["layer", "twice", "map", "swap"]) for _ in range(random.randint(2, 5))]
    passes = [random.random() < 0.7 for _ in kinds]
    pullbacks = random.randint(1, 2)

    def branch(kind: str, x: jax.Array, y: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        if kind == "layer":
            return jnp.tanh(x @ w), y
        if kind == "twice":
            return jnp.tanh(jnp.sin(x @ w) @ w), x + y
        if kind == "map":
            rows = x.reshape(-1, 4, x.shape[1]).swapaxes(0, 1)
            mapped = jax.lax.map(lambda row: jnp.tanh(row @ w) + row, rows)
            return mapped.swapaxes(0, 1).reshape(x.shape), y
        return y, jnp.cos(x)

    def step(w: jax.Array, x: jax.Array, flag: jax.Array) -> Any:
        def losses(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            a, b = x, jnp.sin(x)
            for number, (kind, is_passed) in enumerate(zip(kinds, passes, strict=True)):
                other = (lambda a, b, w: (a, b)) if is_passed else (lambda a, b, w: (b, a @ w))
                taken = lambda a, b, w, kind=kind: branch(kind, a, b, w)  # noqa: E731
                a, b = jax.lax.cond(flag[number] > 0, taken, other, a, b, w)
            return (a**2).mean() + b.sum(), jnp.abs(a).mean()

        values, pullback = jax.vjp(losses, w)
        units = [(1.0, 0.0), (0.0, 1.0)][:pullbacks]
        gradients = [pullback(tuple(map(jnp.float32, unit)))[0] for unit in units]
        return w - 0.1 * sum(gradients), values

    return step, (
        jnp.cos(jnp.arange(64.0 * 64)).reshape(64, 64) / 8,
        jnp.sin(jnp.arange(512.0 * 64)).reshape(512, 64),
        jnp.ones(len(kinds)),
    )


STEPS: Mapping[str, Callable[[int, int], tuple[Step, tuple[Any, ...]]]] = {
    "dense": dense,
    "scanned": scanned,
    "branching": branching,
    "accumulating": accumulating,
    "pooling": pooling,
}


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
