"""Resized images, and what else is a product with a banded constant, against the step as it is."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.program.flat import Flat, flatten
from memplan.program.interpret import interpret
from memplan.program.slabs import bands
from memplan.program.slabs.bands import with_bands
from tests.arrays import assert_close
from tests.program.scans import QUICK

LINEAR = {"dot_general", "gather", "scatter-add"}


def rewritten(function: Callable[..., Any], *args: Any) -> tuple[list[str], float]:
    """The primitives that are left, and the greatest difference by the greatest number of its array."""
    closed = flatten(jax.make_jaxpr(function)(*args))
    new = with_bands(Flat(closed)).closed
    assert new.jaxpr.invars == closed.jaxpr.invars and set(closed.jaxpr.outvars) <= set(
        Flat(new).values
    )
    run = jax.jit(
        lambda *args: [interpret(jaxpr, args) for jaxpr in (closed, new)], compiler_options=QUICK
    )
    plain, results = run(*args)
    differences = [0.0]
    for a, b in zip(plain, results, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        differences.append(np.abs(a - b).max() / (np.abs(a).max() + 1e-9))
    return [eqn.primitive.name for eqn in new.jaxpr.eqns], max(differences)


def resized(method: str, shape: Sequence[int], antialias: bool = True) -> Callable[..., Any]:
    def loss(x: Any) -> Any:
        y = jax.image.resize(jnp.tanh(x), shape, method, antialias)
        return jnp.square(jnp.sin(y.astype(jnp.float32))).sum(), y

    return jax.value_and_grad(loss, has_aux=True)


def normals(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@settings(max_examples=4)
@given(
    st.integers(16, 40),
    st.integers(16, 40),
    st.sampled_from(["nearest", "linear", "cubic"]),
    st.booleans(),
)
def test_a_resized_image_and_its_gradient_are_bands_whatever_the_sizes(
    before: int, after: int, method: str, antialias: bool
) -> None:
    names, difference = rewritten(
        resized(method, (2, after, 24, 3), antialias), normals(2, before, 32, 3)
    )
    assert difference < 1e-5
    assert LINEAR.isdisjoint(names) and names.count("banded") == (2 if before == after else 4)


@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_twice_as_many_rows_of_whole_numbers_keep_every_bit(method: str) -> None:
    x = jnp.round(4 * normals(1, 8, 6, 2))
    names, difference = rewritten(lambda x: jax.image.resize(x, (1, 16, 12, 2), method), x)
    assert (names.count("banded"), difference) == (2, 0.0)


def test_halves_and_labels() -> None:
    names, difference = rewritten(
        resized("linear", (1, 16, 12, 3)), normals(1, 8, 6, 3).astype(jnp.bfloat16)
    )
    assert names.count("banded") == 4 and difference < 0.01
    labels = jnp.arange(48).reshape(1, 8, 6)
    names, difference = rewritten(
        lambda x: (jax.image.resize(x, (1, 4, 12), "nearest"), x[:, ::2] > 3), labels
    )
    assert (names.count("banded"), difference) == (2, 0.0)


def added(x: Any) -> Any:
    return jnp.ones((5, 3)).at[jnp.arange(10) // 2].add(x)


def test_rows_added_by_number_are_added_to_what_is_there() -> None:
    names, difference = rewritten(added, normals(10, 3))
    assert names.count("banded") == 1 and difference < 1e-6 and "scatter-add" not in names


def test_constants_of_the_step() -> None:
    """Weights from outside, and corners that stay where they are."""
    twice = np.kron(np.eye(8), [[1], [0.5]]).astype(np.float32)
    corners = np.float32(15 / 7), np.float32((1 - 15 / 7) / 2)

    def function(x: Any) -> Any:
        apart = jax.image.scale_and_translate(
            x, (16, 4), (0,), *map(jnp.array, zip(corners, strict=True)), "linear"
        )
        return jnp.asarray(twice) @ x, apart

    names, difference = rewritten(function, normals(8, 4))
    assert names.count("banded") == 2 and "dot_general" not in names and difference < 1e-6


UNCHANGED: dict[str, Callable[..., Any]] = {
    "a full matrix": lambda x: jnp.cos(jnp.arange(8.0)[:, None] * jnp.arange(8.0)) @ x,
    "a random matrix": lambda x, key=jax.random.key(0): jax.random.normal(key, (8, 8)) @ x,
    "a matrix that is an argument": lambda x: jnp.eye(8) * x[0, 0] @ x,
    "rows in no order": lambda x: x[jnp.asarray([3, 0, 2, 1, 3, 0])],
    "rows that are not there": lambda x: jnp.zeros_like(x).at[2 * jnp.arange(8)].add(x, mode="drop"),
    "parts of rows": lambda x: jax.lax.gather(
        x, jnp.arange(8)[:, None], jax.lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 2)
    ),
    "matrices by batch": lambda x: jnp.einsum("bij,bjc->bic", jnp.broadcast_to(jnp.eye(4), (8, 4, 4)), x[..., None]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_is_no_band_is_unchanged(name: str) -> None:
    names, difference = rewritten(UNCHANGED[name], normals(8, 4))
    assert "banded" not in names and difference == 0.0


def test_a_matrix_is_computed_once_for_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, value = list[Any](), bands._Constants.value
    monkeypatch.setattr(
        bands._Constants, "value", lambda self, var: [computed.append(var), value(self, var)][1]
    )
    names, _ = rewritten(resized("linear", (1, 58, 58, 1)), normals(1, 29, 29, 1))
    # of rows and of columns; the gradient reads both again
    assert names.count("banded") == 4 and len(computed) == 2


def test_while_another_program_is_traced() -> None:
    closed = flatten(jax.make_jaxpr(resized("linear", (1, 22, 16, 1)))(normals(1, 11, 8, 1)))

    @partial(jax.jit, compiler_options=QUICK)
    def both(x: Any) -> Any:
        return interpret(with_bands(Flat(closed)).closed, [x]), interpret(closed, [x])

    assert_close(*both(normals(1, 11, 8, 1)), rtol=1e-7, atol=1e-5)
