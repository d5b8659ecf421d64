"""What the rules with rows call divisible among devices; that the rows are right is in test_rows.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from memplan.program.ops import axes_of
from tests.program.ops.division import check_parts, divisible
from tests.program.ops.windows import SEEDS, Convolution, Windows, convolutions, floats, windows

PARTS = st.sampled_from([2, 3])
few = settings(max_examples=4)


@few
@given(convolutions(divisible=True, negative=False, max_rows=6), PARTS)
def test_parts_of_a_convolution_and_of_its_gradients(convolution: Convolution, parts: int) -> None:
    def gradients(x: Any, w: Any) -> Any:
        result, pull = jax.vjp(convolution.run, x, w)
        return pull(result)

    check_parts(gradients, convolution.operands, parts, 3e-5)


@few
@given(windows(divisible=True, negative=False, dilation=1, apart=1), PARTS)
def test_parts_of_windows_and_of_their_gradients(windows_: Windows, parts: int) -> None:
    def derivatives(x: Any) -> Any:
        def greatest(x: Any) -> Any:
            return windows_.reduce(x, -np.inf, lax.max)

        result, forward = jax.linearize(greatest, x)
        return forward(x), jax.vjp(greatest, x)[1](result), windows_.reduce(x, 0.0, lax.add)

    check_parts(derivatives, (windows_.array,), parts, 3e-5)


@few
@given(st.integers(1, 6), st.integers(-2, 2), st.integers(-1, 2), st.integers(0, 2), PARTS, SEEDS)
def test_parts_of_what_is_padded_and_cut(
    size: int, low: int, high: int, within: int, parts: int, seed: int
) -> None:
    high = max(high, -low - (size - 1) * (within + 1))
    check_parts(
        lambda x: lax.pad(x, 2.0, [(low, high, within)]), (floats(seed, size),), parts, 3e-5
    )
    check_parts(lambda x: x[max(low, 0) :: within + 1], (floats(seed, 3 + size),), parts, 3e-5)


def divided_in_two(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Of the last equation, by dimension of its result: into two."""
    *_, eqn = jax.make_jaxpr(function)(*args).jaxpr.eqns
    axes = axes_of(eqn)
    return [axis is not None and divisible(axes, axis, eqn, 2) for axis in axes.results[0]]


X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))), [False, True]),
        (lambda x: lax.pad(x, 0.0, ((0, 1, 1), (2, -2, 0))), [True, False]),
        (lambda x: x[:4], [False, True]),
        (lambda x: x[::2, 1::4], [True, True]),
        (lambda x: lax.concatenate([x, x], 0), [False, True]),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 3), (2, 1), "SAME"), [True, False]),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"), [True, False]),
        (lambda x: x.reshape(4, 16), [True, False]),
        (lambda x: jnp.broadcast_to(x[:, None], (8, 2, 8)).reshape(16, 8), [True, True]),
    ],
)
def test_dimensions_are_divisible_where_parts_read_rows_of_their_own(
    function: Callable[..., Any], wanted: Any
) -> None:
    assert divided_in_two(function, X) == wanted


@pytest.mark.parametrize(
    ("size", "stride", "padding", "wanted"),
    [(3, 1, "SAME", False), (1, 1, "VALID", True), (2, 2, "VALID", True)],
)
def test_a_convolution_is_divisible_in_space_without_a_halo(
    size: int, stride: int, padding: str, wanted: bool
) -> None:
    filters = jax.ShapeDtypeStruct((size, size, 4, 6), jnp.float32)

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    assert divided_in_two(convolved, IMAGE, filters) == [True, wanted, wanted, True]
