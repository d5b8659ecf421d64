"""A traced step gives what the step gives: the same trees, types and numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.program.lowerable import as_step
from tests.program.steps import CASES, traced


def types(tree: Any) -> list[Any]:
    """Shape, dtype and weak type of every leaf."""
    avals = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
    return [(aval.shape, aval.dtype, aval.weak_type) for aval in avals]


def assert_same(expected: Any, tree: Any) -> None:
    """Same tree, same types, and equal up to a rounding or two."""
    assert jax.tree.structure(expected) == jax.tree.structure(tree)
    assert types(expected) == types(tree)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(tree), strict=True):
        if jnp.issubdtype(jax.typeof(a).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        elif jax.typeof(a).dtype == jax.dtypes.float0:
            continue
        np.testing.assert_allclose(
            np.asarray(a, np.complex64), np.asarray(b, np.complex64), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", CASES)
def test_the_flat_jaxpr_is_the_step(name: str) -> None:
    case = CASES[name]
    program = traced(case)
    same = as_step(program, program.jaxpr)
    expected = jax.jit(case.step, **case.options)(*case.make(), **case.kwargs)
    assert_same(expected, jax.jit(same, **case.options)(*case.make(), **case.kwargs))
