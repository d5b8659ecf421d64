"""Training steps with loops of every kind, tiny, and random ones; every trip has data of its own."""

import functools
import random
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from memplan.program import compat
from memplan.program.trace import Program, trace

Step = tuple[Callable[..., Any], tuple[Any, ...]]
# for the compiler
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _layer(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w)
    return x + y * jax.nn.sigmoid(y)


def layers() -> Step:
    """Over layers: a slice of the weights per trip."""

    def loss(ws: Any, x: Any) -> Any:
        return jnp.square(jax.lax.scan(lambda c, w: (_layer(c, w), None), x, ws)[0]).sum()

    return jax.value_and_grad(loss), (_data(5, 4, 4), _data(3, 4, seed=1))


def time_steps() -> Step:
    """Over time: shared weights, a result per trip, two carries of different types."""

    def loss(w: Any, xs: Any) -> Any:
        def trip(carry: Any, x: Any) -> Any:
            h, count = carry
            h = jnp.tanh(h @ w + x)
            return (h, count + 1), h.sum() * count

        (h, _), ys = jax.lax.scan(trip, (jnp.zeros(4), 0), xs)
        return h.sum() + jnp.square(ys).sum()

    return jax.value_and_grad(loss), (_data(4, 4), _data(6, 4, seed=1))


def backwards() -> Step:
    """The forward loop runs from the end."""

    def loss(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, w: (_layer(c, w), c.sum()), x, ws, reverse=True)[0].sum()

    return jax.grad(loss), (_data(5, 4, 4), _data(3, 4, seed=1))


def nested() -> Step:
    """Over time, and in every trip over layers."""

    def loss(ws: Any, xs: Any) -> Any:
        def outer(h: Any, x: Any) -> Any:
            inner = jax.lax.scan(lambda c, w: (_layer(c, w), None), h + x, ws)[0]
            return inner, inner.sum()

        return jax.lax.scan(outer, jnp.zeros((2, 4)), xs)[1].sum()

    return jax.grad(loss), (_data(3, 4, 4), _data(4, 2, 4, seed=1))


def accumulated() -> Step:
    """Gradients summed over slices of the batch; each slice runs a forward and a backward loop."""
    gradient, (ws, _) = layers()

    def step(ws: Any, batches: Any) -> Any:
        def trip(total: Any, batch: Any) -> Any:
            value, weights_gradient = gradient(ws, batch)
            return total + weights_gradient, value

        return jax.lax.scan(trip, jnp.zeros_like(ws), batches)

    return step, (ws, _data(4, 3, 4, seed=1))


def checkpointed() -> Step:
    def loss(ws: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (_layer(c, w), None), prevent_cse=False)
        return jax.lax.scan(body, x, ws)[0].sum()

    return jax.grad(loss), (_data(5, 4, 4), _data(3, 4, seed=1))


def mapped() -> Step:
    def loss(w: Any, xs: Any) -> Any:
        return jax.lax.map(lambda x: jnp.sin(x @ w) * x, xs).sum()

    return jax.grad(loss), (_data(4, 4), _data(6, 4, seed=1))


def stacked_twice() -> Step:
    """A residual that the step also returns, and one that two loops read."""

    def loss(ws: Any, x: Any) -> Any:
        last, kept = jax.lax.scan(lambda c, w: (_layer(c, w), jnp.sin(c)), x, ws)
        return last.sum() + jax.lax.scan(lambda c, k: (c + jnp.cos(k).sum(), None), 0.0, kept)[
            0
        ], kept

    return jax.value_and_grad(loss, has_aux=True), (_data(5, 4, 4), _data(3, 4, seed=1))


def dropped_out() -> Step:
    """Randomness from a key that the loop carries."""

    def loss(ws: Any, x: Any, key: Any) -> Any:
        def trip(carry: Any, w: Any) -> Any:
            h, key = carry
            key, trip_key = jax.random.split(key)
            kept = jax.random.bernoulli(trip_key, 0.5, h.shape)
            return (jnp.where(kept, _layer(h, w), h), key), None

        return jax.lax.scan(trip, (x, key), ws)[0][0].sum()

    return jax.grad(loss), (_data(5, 4, 4), _data(3, 4, seed=1), jax.random.key(3))


def branching() -> Step:
    """A conditional and an inner `while` in the body."""

    def loss(ws: Any, x: Any) -> Any:
        def trip(c: Any, w: Any) -> Any:
            y = jax.lax.cond(c.sum() > 0, lambda: _layer(c, w), lambda: c - w.sum())
            rounds = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
            return y * rounds, None

        return jax.lax.scan(trip, x, ws)[0].sum()

    return jax.grad(loss), (_data(5, 4, 4), _data(3, 4, seed=1))


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + nn.Dense(4)(nn.gelu(nn.LayerNorm()(x))), None


def of_flax() -> Step:
    """`nn.scan` over layers."""
    stack = nn.scan(_Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()
    x = _data(3, 4)
    params = jax.jit(stack.init)(jax.random.key(0), x, None)
    return jax.grad(lambda params, x: stack.apply(params, x, None)[0].sum()), (params, x)


STEPS = {
    make.__name__: make
    for make in (layers, time_steps, backwards, nested, accumulated, checkpointed, mapped, stacked_twice, dropped_out,
                 branching, of_flax)
}  # fmt: skip


@functools.cache
def traced_step(make: Callable[[], Step]) -> tuple[Program, tuple[Any, ...]]:
    """A step's program, and its arguments."""
    step, args = make()
    return trace(step, args, {}, {}), args


@functools.cache
def plain_outputs(make: Callable[[], Step]) -> list[np.ndarray]:
    """What it gives."""
    return outputs(*traced_step(make))


def traced(name: str) -> tuple[Program, tuple[Any, ...]]:
    """One of them, and its arguments."""
    return traced_step(STEPS[name])


def plain(name: str) -> list[np.ndarray]:
    """What it gives."""
    return plain_outputs(STEPS[name])


def outputs(program: Program, args: tuple[Any, ...]) -> list[np.ndarray]:
    """What a program gives."""
    run = jax.jit(compat.jaxpr_as_fun(program.jaxpr), compiler_options=QUICK)
    return [np.asarray(out) for out in run(*map(jax.numpy.asarray, jax.tree.leaves(args)))]


def assert_same(arrays: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    """Are arrays equal up to a share of the largest number, and of one type?"""
    for array, expected_array in zip(arrays, expected, strict=True):
        assert array.dtype == expected_array.dtype
        largest = max(1.0, np.abs(expected_array).max(initial=0))
        np.testing.assert_allclose(array, expected_array, rtol=tolerance, atol=tolerance * largest)


def random_step(seed: int) -> Step:
    """Loops in sequence and in each other, some reversed; two carries, values read in the next trip, and results."""
    draw = random.Random(seed)
    width = 3
    unary = (
        jnp.sin,
        jnp.tanh,
        jnp.cos,
        jax.nn.sigmoid,
        lambda x: x * 0.5,
        lambda x: jnp.roll(x, 1),
    )
    binary = (lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a - b)

    def program(depth: int) -> Callable[..., Any]:
        """A function of carries, weights of a trip and shared weights -> carries, results."""
        kinds = ("unary", "binary", "product", "product")
        count = draw.randint(2, 7)
        plan = [
            (draw.choice(kinds), draw.random(), draw.random(), draw.randrange(6))
            for _ in range(count)
        ]
        within = depth and draw.random() < 0.6
        inner = (program(depth - 1), draw.random() < 0.3, draw.randint(1, 3)) if within else None
        mixes = [draw.random() for _ in range(3)]

        def body(carries: Any, slices: Any, shared: Any) -> Any:
            values = [*carries, *slices[:1]]
            for kind, first, second, which in plan:
                a, b = values[int(first * len(values))], values[int(second * len(values))]
                if kind == "unary":
                    values.append(unary[which % len(unary)](a))
                elif kind == "binary":
                    values.append(binary[which % len(binary)](a, b))
                else:
                    values.append(jnp.tanh(a @ (slices[1] if which % 2 else shared)))
            if inner is not None:
                run, reverse, trips = inner
                weights = jnp.stack([slices[1] * (trip + 1) for trip in range(trips)])
                rows = jnp.stack([values[-1] * (trip + 2) for trip in range(trips)])
                ends, rows_out = jax.lax.scan(
                    lambda c, s: run(c, s, shared),
                    tuple(values[-2:]),
                    (rows, weights),
                    reverse=reverse,
                )
                values += [*ends, rows_out.sum(0)]
            picked = [values[int(mix * len(values))] for mix in mixes]
            return (picked[0] + 0.1 * values[-1], picked[1]), picked[2]

        return body

    parts = [(program(draw.randint(0, 2)), draw.random() < 0.3) for _ in range(draw.randint(1, 2))]
    trips = draw.randint(1, 5)
    returns_rows = draw.random() < 0.3

    def loss(weights: Any, shared: Any, rows: Any) -> Any:
        carries = (rows[0], rows[-1] * 0.5)
        for run, reverse in parts:
            trip = functools.partial(run, shared=shared)
            carries, rows = jax.lax.scan(trip, carries, (rows, weights), reverse=reverse)
        return jnp.sum(carries[0]) + jnp.sum(jnp.sin(rows)), rows if returns_rows else 0.0

    generator = np.random.default_rng(seed)
    data = (generator.normal(size=(trips, width, width)), generator.normal(size=(width, width)),
            generator.normal(size=(trips, width)))  # fmt: skip
    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True), data
