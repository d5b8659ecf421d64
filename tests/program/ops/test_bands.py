"""Bands of matrices, and products with them; on some of their rows in test_rows.py."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.planning.graph import Rows
from memplan.program import ops
from memplan.program.ops.bands import MOST_TAPS, Band, banded, first_of, taps_of


def band_of(rows: Sequence[Sequence[float]] | np.ndarray) -> Band | None:
    matrix = np.asarray(rows, np.float32)
    return Band.of(matrix.shape, *np.nonzero(matrix), matrix[np.nonzero(matrix)])


TWICE = [[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.75, 0], [0, 0.75, 0.25], [0, 0.25, 0.75], [0, 0, 1]]


def test_the_rows_of_a_band_are_those_whose_weights_are_not_zero() -> None:
    band = band_of(TWICE)
    assert not band.takes
    assert band.rows == Rows(stride=1, dilation=2, before=2, reach=4)
    assert taps_of(band.rows) == 2 and [first_of(band.rows, row) for row in range(6)] == [
        -1,
        0,
        0,
        1,
        1,
        2,
    ]
    assert band.weights.tolist() == [
        [0, 1],
        [0.75, 0.25],
        [0.25, 0.75],
        [0.75, 0.25],
        [0.25, 0.75],
        [1, 0],
    ]


def test_what_is_not_there_is_not_read() -> None:
    band = band_of(TWICE)
    result = banded(jnp.asarray([[np.inf, 2.0, 4.0]]).T, band.weights, 0, band.rows, 6, jnp.float32)
    assert result[-2:, 0].tolist() == [3.5, 4.0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.bool_])
def test_a_band_of_single_ones_takes_rows(dtype: np.dtype) -> None:
    band = band_of(np.repeat(np.eye(3), 2, 0))
    assert band.takes
    x = jnp.asarray([[1, 0, 1]], dtype)
    result = banded(x, None, 1, band.rows, 6, dtype)
    assert result.dtype == dtype and result.tolist() == np.repeat(x, 2, 1).tolist()


@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((4, 8)),
        np.ones((4, 8)),
        np.eye(8)[::-1],  # from the last row to the first
        np.tri(3 * MOST_TAPS, k=MOST_TAPS) - np.tri(3 * MOST_TAPS, k=-1),
    ],
    ids=["zeros", "ones", "turned", "wide"],
)
def test_a_matrix_that_is_no_narrow_band(matrix: np.ndarray) -> None:
    assert band_of(matrix) is None


def test_halves_are_added_up_in_float32() -> None:
    band = band_of(np.tri(64, k=30) - np.tri(64, k=-31))
    halves = jnp.full((64, 1), 1.0078125, jnp.bfloat16)
    result = banded(halves, band.weights, 0, band.rows, 64, jnp.bfloat16)
    assert float(result[32, 0]) == 61.5  # of 61.4766


def test_it_costs_two_operations_a_tap() -> None:
    band = band_of(TWICE)
    assert band is not None
    (eqn,) = jax.make_jaxpr(lambda x, w: banded(x, w, 1, band.rows, 6, x.dtype))(
        jnp.ones((5, 3)), band.weights
    ).eqns
    assert (ops.flops_of(eqn), ops.of(eqn).fusion) == (2 * 2 * 5 * 6, "kernel")
