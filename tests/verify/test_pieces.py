"""A jaxpr run in pieces gives what it gives in one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from memplan.program import compat
from memplan.program.trace import trace
from memplan.verify.pieces import run_in_pieces
from tests.program.scans import STEPS


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("name", ["layers", "nested", "stacked_twice", "branching"])
def test_the_same_numbers(name: str, length: int) -> None:
    step, args = STEPS[name]()
    closed = trace(step, args, {}, {}).jaxpr
    leaves = [jax.numpy.asarray(leaf) for leaf in jax.tree.leaves(args)]
    whole = jax.jit(compat.jaxpr_as_fun(closed))(*leaves)
    for expected, found in zip(whole, run_in_pieces(closed, leaves, length, {}), strict=True):
        assert expected.dtype == found.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_loop_without_trips() -> None:
    closed = trace(
        lambda xs: jax.lax.scan(lambda c, x: (c + x, c * x), 1.0, xs), (np.ones(0, np.float32),), {}, {}
    ).jaxpr
    last, made = run_in_pieces(closed, [np.ones(0, np.float32)], 3, {})
    assert last == 1.0
    assert made.shape == (0,)
