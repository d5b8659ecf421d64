"""A jaxpr run in pieces gives what it gives in one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from memplan.program.trace import trace
from memplan.verify.numbers import in_pieces
from tests.program.scans import plain, traced


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("name", ["layers", "nested", "stacked_twice", "branching"])
def test_the_same_numbers(name: str, length: int) -> None:
    program, args = traced(name)
    leaves = [jax.numpy.asarray(leaf) for leaf in jax.tree.leaves(args)]
    for expected, actual in zip(
        plain(name), in_pieces(program.jaxpr, length, {})(leaves), strict=True
    ):
        assert expected.dtype == actual.dtype
        # differences of large sums are rounded as those are
        scale = float(np.max(np.abs(expected), initial=1.0))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * scale)


def test_a_loop_without_trips() -> None:
    closed = trace(
        lambda xs: jax.lax.scan(lambda c, x: (c + x, c * x), 1.0, xs),
        (np.ones(0, np.float32),),
        {},
        {},
    ).jaxpr
    last, products = in_pieces(closed, 3, {})([np.ones(0, np.float32)])
    assert last == 1.0
    assert products.shape == (0,)
