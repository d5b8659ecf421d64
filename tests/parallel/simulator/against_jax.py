"""Whether the simulated devices compute what jax does; random operands to ask it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parallel.simulator.lockstep import lockstep
from tests.parallel.simulator.simulated import raw

RNG = np.random.default_rng(0)
TOLERANCES = {"float16": 3e-3, "bfloat16": 2e-2}
Function = Callable[..., Any]
plain = pytest.mark.usefixtures("without_jax")


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: Any = np.int32) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


def assert_close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    found, expected = raw(found), raw(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if not jnp.issubdtype(found.dtype, np.inexact):
        np.testing.assert_array_equal(found, expected)
        return
    tolerance = TOLERANCES.get(found.dtype.name, tolerance)
    kind = np.complex128 if found.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(found.astype(kind), expected.astype(kind), rtol=tolerance, atol=tolerance)


def compiled(function: Function) -> Function:
    """Quickly; what it computes is all that counts."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def assert_same(function: Function, *args: Any, tolerance: float = 2e-5) -> None:
    """On one device what jax computes."""
    closed = jax.make_jaxpr(function)(*args)
    found = lockstep(closed, [[leaf] for leaf in jax.tree.leaves(args)], {})
    for (one,), expected in zip(found, jax.tree.leaves(compiled(function)(*args)), strict=True):
        assert_close(one, expected, tolerance)
