"""Scratch memory of single equations, as XLA:GPU was seen to need it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from memplan.program import rules

IMAGE = (2, 8, 8, 4)
NBYTES = 4 * 2 * 8 * 8 * 4


def workspace(function, *shapes, primitive: str, dtype=jnp.float32) -> int:
    jaxpr = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]).jaxpr
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == primitive]
    return rules.workspace_of(eqn)


def test_reductions_along_rows_are_those_over_the_last_axis_alone():
    def along_rows(function):
        (eqn,) = jax.make_jaxpr(function)(jnp.ones((2, 3, 4))).jaxpr.eqns
        return rules.is_along_rows(eqn)

    assert along_rows(lambda x: lax.reduce_max(x, (2,))) and along_rows(lambda x: lax.reduce_sum(x, (2,)))
    assert not along_rows(lambda x: lax.reduce_sum(x, (1,)))
    assert not along_rows(lambda x: lax.reduce_sum(x, (1, 2)))
    assert not along_rows(lambda x: lax.argmax(x, 1, jnp.int32))
    assert not along_rows(lambda x: lax.exp(x))


def pool_gradient(window: int):
    def pooled(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, window, window, 1), "VALID").sum()

    return jax.grad(pooled)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_winners_of_a_pool_are_counted_beyond_the_operand(dtype):
    winners = 2 * 4 * 4 * 4 * (4 + 4 * 4)  # a value and four indices for each window of 2 x 2
    found = workspace(pool_gradient(2), IMAGE, primitive="select_and_scatter_add", dtype=dtype)
    assert found == winners - NBYTES * jnp.dtype(dtype).itemsize // 4


def test_few_winners_fit_where_the_result_will_be():
    assert workspace(pool_gradient(4), IMAGE, primitive="select_and_scatter_add") == 0


def convolution(padding, **options):
    def convolved(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    return convolved


def test_uneven_padding_is_a_copy_of_the_input():
    found = workspace(convolution((0, 1)), IMAGE, (2, 2, 4, 1), primitive="conv_general_dilated")
    assert found == 4 * 2 * 9 * 9 * 4 - NBYTES // 4  # the result has a quarter of the channels


@pytest.mark.parametrize(
    "convolved", [convolution((1, 1)), convolution((0, 0)), convolution((1, 2), lhs_dilation=(2, 2))]
)
def test_even_padding_and_the_gradient_of_a_stride_need_no_copy(convolved):
    assert workspace(convolved, IMAGE, (3, 3, 4, 4), primitive="conv_general_dilated") == 0
