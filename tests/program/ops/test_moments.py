"""Squares about a mean, against numpy in double precision; parts put together, against the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.program import compat, ops
from memplan.program.ops import Moments, axes_of, squares_about_mean
from tests.program.ops.division import divisible


def normals(mean: float, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(mean, 1, shape), jnp.float32)


def squares_of(x: jax.Array, axes: tuple[int, ...]) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return np.square(x - x.mean(axes, keepdims=True)).sum(axes)


def test_it_is_the_sum_of_squares_about_the_mean_of_what_counts():
    x = normals(0, 6, 4, 3)
    counts = jnp.asarray([1, 1, 1, 1, 0, 0.0]).reshape(6, 1, 1)
    np.testing.assert_allclose(
        squares_about_mean(x, counts, (0, 1)), squares_of(x[:4], (0, 1)), rtol=1e-5
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from([0.0, 1.0, 1e4]))
@settings(max_examples=10, deadline=None)
def test_moments_of_parts_are_those_of_the_whole_however_far_the_mean_lies_from_zero(
    sizes: list[int], mean: float
):
    x = normals(mean, sum(sizes) + 1, 4, 3)
    parts = [*np.split(np.asarray(x), np.cumsum(sizes)), np.zeros((0, 4, 3), np.float32)]
    each = (
        Moments.of(jnp.asarray(part), jnp.ones((len(part), 1, 1)), (0, 1))
        for part in parts
        if len(part)
    )
    total = functools.reduce(Moments.accumulate, each, Moments.none((3,), jnp.float32))
    assert float(total.count) == 4 * len(x)
    np.testing.assert_allclose(total.squares, squares_of(x, (0, 1)), rtol=1e-5)
    np.testing.assert_allclose(
        total.mean_hi + total.mean_lo, np.asarray(x, np.float64).mean((0, 1)), rtol=1e-6, atol=1e-6
    )


def test_compiled_in_a_loop_they_are_as_exact():
    x = normals(1e4, 24, 4, 3)

    @jax.jit
    def looped(x):
        def trip(total, part):
            return total.accumulate(Moments.of(part, jnp.ones((3, 1, 1)), (0, 1))), None

        return jax.lax.scan(trip, Moments.none((3,), jnp.float32), x.reshape(8, 3, 4, 3))[0].squares

    np.testing.assert_allclose(looped(x), squares_of(x, (0, 1)), rtol=1e-6)


def test_rows_that_do_not_count_add_nothing_and_a_part_may_have_no_others():
    x, none = normals(1e4, 5, 3), jnp.zeros((5, 1))
    total = Moments.of(x, none + 1, (0,)).accumulate(Moments.of(jnp.zeros((5, 3)), none, (0,)))
    np.testing.assert_allclose(total.squares, squares_of(x, (0,)), rtol=1e-5)


def test_halves_are_added_up_in_float32_and_come_out_as_halves():
    x = normals(3, 4096, 2).astype(jnp.bfloat16)
    squares = squares_about_mean(x, jnp.ones((4096, 1), jnp.bfloat16), (0,))
    assert squares.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        squares.astype(jnp.float32),
        squares_of(x.astype(jnp.float32), (0,)),
        rtol=2**-8,
    )


def test_its_equation_is_a_reduction_that_nobody_divides_by_devices():
    def function(x):
        return squares_about_mean(x, jnp.ones((8, 1, 1)), (0, 1))

    eqn = jax.make_jaxpr(function)(normals(0, 8, 4, 2)).jaxpr.eqns[-1]
    axes = axes_of(eqn)
    assert axes.reduced == {0: "moments"}  # of other rows nobody says which ones count
    assert axes.operands == ((0, None, 2), (0, None, None)) and axes.results == ((2,),)
    assert not divisible(axes, 0, eqn, 2) and divisible(axes, 2, eqn, 2)
    assert ops.of(eqn).fusion == "reduction" and ops.flops_of(eqn) == 4 * 8 * 4 * 2
    assert compat.aval_of(eqn.outvars[0]).shape == (2,)


def test_a_single_row_counts_alone_however_many_a_window_has():
    eqn = jax.make_jaxpr(lambda x: squares_about_mean(x, jnp.ones((1, 1)), (0,)))(
        normals(0, 1, 2)
    ).jaxpr.eqns[-1]
    axes = axes_of(eqn)
    assert axes.operands == ((0, 1), (0, None))
