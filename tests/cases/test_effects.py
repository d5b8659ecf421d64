"""Steps that call Python where a plan runs kernels again: each call happens once, in order, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

from tests.cases.within_share import Made, assert_same, descended, layers, mlp, normal, within_share

WIDTH, ROWS = 32, 2048
Heard = list[tuple[Any, ...]]


def printed(tells: Callable[..., None]) -> Made:
    """`jax.debug.print` in a branch, in a scan, and in the condition and body of a `while`."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def layer(y: jax.Array, weight: jax.Array) -> Any:
                y = jnp.tanh(y @ weight)
                loud = lambda: jax.debug.print("scan {m} {n}", m=y.mean(), n=y[0, :2])  # noqa: E731
                lax.cond(y[0, 0] > 0, loud, lambda: None)
                return y, None

            return (lax.scan(layer, mlp(weights[:2], x), jnp.stack(weights[2:]))[0] ** 2).mean()

        def goes_on(carry: Any) -> jax.Array:
            jax.debug.print("asked {}", carry[1])
            return carry[1] < 2

        def body(carry: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(carry[0])
            jax.debug.print("loss {}", value, ordered=True)
            return descended(carry[0], gradients), carry[1] + 1

        return lax.while_loop(goes_on, body, (weights, 0))

    return step, (layers(4, WIDTH), normal(ROWS, WIDTH, seed=9))


def logged(tells: Callable[..., None]) -> Made:
    """An ordered `io_callback` that answers: its answer is the next trip's rate; another one at the end of all."""

    def step(weights: Any, x: jax.Array) -> Any:
        def answer(value: Any) -> np.float32:
            tells("loss", float(value))
            return np.float32(0.1 + 0.01 * np.tanh(value))

        def trip(carry: Any, scale: jax.Array) -> Any:
            weights, rate = carry
            value, gradients = jax.value_and_grad(
                lambda weights: (mlp(weights, scale * x) ** 2).mean()
            )(weights)
            rate = io_callback(answer, jax.ShapeDtypeStruct((), jnp.float32), value, ordered=True)
            return (descended(weights, gradients, rate), rate), value

        carry, values = lax.scan(trip, (weights, jnp.float32(0.1)), jnp.arange(1.0, 4.0))
        io_callback(lambda values: tells("all", *values.tolist()), None, values, ordered=True)
        return carry

    return step, (layers(4, WIDTH), normal(ROWS, WIDTH, seed=9))


def simulated(tells: Callable[..., None]) -> Made:
    """A loss by `pure_callback` with a gradient of its own, also by a `pure_callback`, on a reduced array."""

    @jax.custom_vjp
    def outside(y: jax.Array) -> jax.Array:
        return jax.pure_callback(
            lambda y: np.float32((np.asarray(y) ** 2).mean()),
            jax.ShapeDtypeStruct((), jnp.float32),
            y,
        )

    def backward(y: jax.Array, cotangent: jax.Array) -> Any:
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        slope = jax.pure_callback(
            lambda y: np.float32(2 / y.size) * np.asarray(y), shape, y, vmap_method="sequential"
        )
        return (cotangent * slope,)

    outside.defvjp(lambda y: (outside(y), y), backward)

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = mlp(weights[:2], x)
            return outside(mlp(weights[2:], y)[:, :4]) + outside(y[:, 4:8])

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    return step, (layers(4, WIDTH), normal(ROWS, WIDTH, seed=9))


def watched(tells: Callable[..., None]) -> Made:
    """`jax.debug.callback` with keywords, a partial and whole arrays, on activations that a plan makes again."""

    def saw(name: str, array: Any, *, norm: Any, rows: int = 0) -> None:
        tells(name, float(norm), np.asarray(array).tobytes()[:rows])

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = x
            for layer, weight in enumerate(weights):
                y = jnp.tanh(y @ weight)
                if layer % 2:
                    jax.debug.callback(
                        partial(saw, f"layer {layer}", rows=64),
                        y,
                        norm=(y**2).sum(),
                        ordered=layer > 2,
                    )
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        jax.debug.callback(partial(saw, "gradient"), gradients[0], norm=value)
        return descended(weights, gradients), value

    return step, (layers(4, WIDTH), normal(ROWS, WIDTH, seed=9))


def counted(tells: Callable[..., None]) -> Made:
    """Calls of no value and of a key's, in branches of branches in a scan whose gradients are summed."""

    def step(weights: Any, x: jax.Array, key: jax.Array) -> Any:
        def part(total: Any, inputs: Any) -> Any:
            rows, key = inputs

            def loss(weights: Any) -> jax.Array:
                return (
                    jnp.where(jax.random.bernoulli(key, 0.9, rows.shape), mlp(weights, rows), 0)
                    ** 2
                ).mean()

            value, gradients = jax.value_and_grad(loss)(weights)

            def kept() -> None:
                jax.debug.callback(lambda: tells("kept"), ordered=True)

            def drawn() -> None:
                jax.debug.callback(
                    lambda x: tells("drawn", float(x)), jax.random.uniform(key), ordered=True
                )

            lax.cond(
                value > 0, lambda: lax.cond(jax.random.bernoulli(key), kept, drawn), lambda: None
            )
            return jax.tree.map(jnp.add, total, gradients), value

        xs = x.reshape(4, -1, WIDTH), jax.random.split(key, 4)
        gradients, values = lax.scan(part, jax.tree.map(jnp.zeros_like, weights), xs)
        return descended(weights, gradients), values

    return step, (layers(4, WIDTH), normal(4 * ROWS, WIDTH, seed=9), jax.random.key(3))


@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(printed, 0.85, marks=pytest.mark.slow),
        (logged, 0.7),
        (simulated, 0.7),
        (watched, 0.7),
        pytest.param(counted, 0.85, marks=pytest.mark.slow),
    ],
)
def test_python_is_called_as_by_jax_jit(
    make: Any, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: Heard = []

    def told(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Results; what the ordered calls said; lines, of which those in no order are sorted."""
        heard.clear()
        results = jax.block_until_ready(run(*args))
        jax.effects_barrier()
        lines = capsys.readouterr().out.splitlines()
        return (
            results,
            list(heard),
            sorted(lines),
            [line for line in lines if line.startswith("loss")],
        )

    step, args = make(lambda *values: heard.append(values))
    run = within_share(share, step, args, split=False)
    assert not heard and not capsys.readouterr().out
    results, *said = told(run.planned.compile(), args)
    expected, *by_jit = told(run.plain, args)
    assert said == by_jit and (any(said) or make is simulated)
    assert_same(results, expected, run)


@pytest.mark.parametrize("where", [pytest.param("branch", marks=pytest.mark.slow), "body"])
def test_an_error_of_equinox_is_raised_as_by_jax_jit(where: str) -> None:
    def checked(y: jax.Array) -> jax.Array:
        return eqx.error_if(y, y[0, 0] > 0.9, "the first is large")

    def placed(y: jax.Array) -> jax.Array:
        if where == "branch":
            return lax.cond(y[0, 1] < 2, checked, lambda y: -y, y)
        return lax.scan(lambda y, _: (checked(0.95 * y), None), y, length=2)[0]

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return (mlp(weights[2:], placed(mlp(weights[:2], x))) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    weights, x = layers(4, WIDTH), normal(ROWS, WIDTH, seed=9)
    run = within_share(0.75, step, (weights, x), split=False)
    compiled = run.planned.compile()
    assert_same(compiled(weights, x), run.plain(weights, x), run)
    large = [jnp.full_like(weight, 1.0) for weight in weights], jnp.ones_like(x)
    for called in (compiled, run.plain):
        with pytest.raises(jax.errors.JaxRuntimeError, match="the first is large"):
            jax.block_until_ready(called(*large))
    assert_same(compiled(weights, x), run.plain(weights, x), run)  # the step can be called again


def test_what_checkify_finds_is_found() -> None:
    """By a check of the step's own, and by those for NaN that checkify adds, in a scan and its gradient, too."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = lax.scan(
                lambda y, weight: (jnp.tanh(y @ weight), None),
                mlp(weights[:1], x),
                jnp.stack(weights[1:]),
            )[0]
            checkify.check((y**2).mean() < 0.8, "too large: {}", (y**2).mean())
            return (y**2).mean() + jnp.log(x[0, 0] ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return descended(weights, gradients), value

    weights, x = layers(3, WIDTH), normal(ROWS, WIDTH, seed=9)
    checked = checkify.checkify(step, checkify.user_checks | checkify.float_checks)
    run = within_share(0.75, checked, (weights, x), split=False)
    compiled = run.planned.compile()
    messages = []
    for args in ((weights, x), (weights, x / 0), ([30 * weight for weight in weights], x)):
        (error, results), (expected, plain_results) = compiled(*args), run.plain(*args)
        messages.append((error.get() or "").partition(" generated")[0].partition(":")[0])
        assert error.get() == expected.get()
        assert_same(results, plain_results, run)
    assert messages == ["", "nan", "too large"]
