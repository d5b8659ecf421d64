"""Arrays of a pytree, one by one, against those that are expected."""

from typing import Any

import jax
import numpy as np


def assert_equal(results: Any, expected: Any) -> None:
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(result, wanted)


def assert_close(results: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=rtol, atol=atol)


def assert_near(results: Any, expected: Any, within: float) -> None:
    """The error is a share of the largest number of its array."""
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        atol = within * (np.abs(wanted).max(initial=0.0) + 1e-9)
        np.testing.assert_allclose(result, wanted, rtol=0, atol=atol)


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes instead of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def assert_same_bits(results: Any, expected: Any) -> None:
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert np.asarray(result).tobytes() == np.asarray(wanted).tobytes()
