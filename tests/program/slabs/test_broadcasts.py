"""What is the same along dimensions that are summed over; what was centred, and what was not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.program import compat
from memplan.program.flat import flatten
from memplan.program.interpret import interpret
from memplan.program.slabs.early_sums import Sum, broadcast_of, centred, squared

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 4, 3)), jnp.float32)


def last_of(
    function: Callable[..., Any], *args: Any
) -> tuple[Any, dict[Any, compat.JaxprEqn], compat.ClosedJaxpr]:
    closed = flatten(jax.make_jaxpr(function)(*args))
    return (
        closed.jaxpr.outvars[0],
        {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars},
        closed,
    )


@pytest.mark.parametrize("axes", [(1, 2), (0,), (0, 1, 2, 3), (1,)])
@pytest.mark.parametrize("own", [(2, 8, 4, 3), (1, 8, 1, 3), (2, 1, 1, 1), (1, 1, 1, 1)])
def test_a_sum_is_that_of_what_the_array_is_broadcast_to(
    axes: tuple[int, ...], own: tuple[int, ...]
):
    total, x = Sum(X.shape, axes), X[tuple(slice(size) for size in own)]
    np.testing.assert_allclose(
        total.of(x), jnp.broadcast_to(x, X.shape).sum(axes), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("spread", "shape"),
    [
        (lambda a: jax.lax.broadcast_in_dim(a, X.shape, (0, 3)), (2, 3)),
        (lambda a: jax.lax.broadcast_in_dim(a, X.shape, (0, 1, 3)), (2, 1, 3)),
        (lambda a: jax.lax.broadcast_in_dim(a, X.shape, ()), ()),
        (lambda a: -a, (2, 1, 1, 3)),
        (lambda a: -a, ()),
    ],
)
def test_the_thin_source_is_what_every_summed_element_is(
    spread: Callable[..., Any], shape: tuple[int, ...]
):
    source_array = jnp.arange(1.0, 1 + int(np.prod(shape))).reshape(shape)
    total = Sum(X.shape, (1, 2))
    out, equations, closed = last_of(spread, source_array)
    broadcast = broadcast_of(out, total, equations)
    result = interpret(closed, [source_array])[0]
    source = source_array if broadcast.source is closed.jaxpr.invars[0] else result
    whole = jnp.broadcast_to(result, X.shape)
    np.testing.assert_array_equal(broadcast.thin(source, total), whole[:, 0, 0])


@pytest.mark.parametrize("shape", [(2, 8, 1, 3), (2, 1, 4, 1), X.shape])
def test_what_differs_along_a_summed_dimension_is_spread_from_nothing(shape: tuple[int, ...]):
    out, equations, _ = last_of(lambda a: -a, jnp.ones(shape))
    assert broadcast_of(out, Sum(X.shape, (1, 2)), equations) is None


def mean(x: jax.Array, axes: tuple[int, ...] = (1, 2)) -> jax.Array:
    return x.mean(axes, keepdims=True)


CENTRED = {
    "jnp.mean": lambda x: x - mean(x),
    "its negative": lambda x: mean(x) - x,
    "a sum times one by the count": lambda x: x - (x.sum((1, 2)) * (1 / 32))[:, None, None],
    "broadcast first": lambda x: x - jnp.broadcast_to(mean(x), x.shape),
}
NOT_CENTRED = {
    "another array's mean": lambda x: x - mean(x * x),
    "over other dimensions": lambda x: x - mean(x, (1,)),
    "half of it": lambda x: x - mean(x) / 2,
    "by one less": lambda x: x - x.sum((1, 2), keepdims=True) / 31,
    "rounded to halves": lambda x: x - mean(x).astype(jnp.bfloat16).astype(jnp.float32),
    "added": lambda x: x + mean(x),
}


@pytest.mark.parametrize("name", [*CENTRED, *NOT_CENTRED])
def test_what_was_centred_is_known(name: str):
    out, equations, closed = last_of((CENTRED | NOT_CENTRED)[name], X)
    expected = closed.jaxpr.invars[0] if name in CENTRED else None
    assert centred(out, Sum(X.shape, (1, 2)), equations) is expected


def test_a_mean_whose_dimensions_were_exchanged_is_none():
    square = jnp.ones((8, 3, 3))

    def exchanged(x):
        return x - x.mean(0).T[None]

    out, equations, _ = last_of(exchanged, square)
    assert centred(out, Sum(square.shape, (0,)), equations) is None


SQUARES = [jnp.square, lambda x: x * x, lambda x: jax.lax.integer_pow(x, 2)]
NO_SQUARES = [lambda x: x * 2, lambda x: jax.lax.integer_pow(x, 3), jnp.sin]


@pytest.mark.parametrize("function", [*SQUARES, *NO_SQUARES])
def test_squares_are_known(function: Callable[..., Any]):
    out, equations, closed = last_of(function, X)
    assert squared(out, equations) is (closed.jaxpr.invars[0] if function in SQUARES else None)
