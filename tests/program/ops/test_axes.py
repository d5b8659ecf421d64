"""Axes of an equation, and its parameters for one part; that parts give the whole is in test_axis_rules.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from memplan.program import compat
from memplan.program.ops import Axes
from tests.program.ops.division import divisible

X = jax.ShapeDtypeStruct((8, 6), jnp.float32)


def only(function: Callable[..., Any], *args: Any) -> compat.JaxprEqn:
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


def test_all_dimensions_of_an_axis_have_to_be_divisible() -> None:
    eqn = only(lambda a, b: a @ b, X, jax.ShapeDtypeStruct((6, 4), jnp.float32))
    axes = Axes(((0, 1), (1, 2)), ((0, 2),), {1: "sum"})
    assert [divisible(axes, axis, eqn, 4) for axis in range(3)] == [True, False, True]
    assert divisible(axes, 1, eqn, 3) and not divisible(axes, 2, eqn, 8)


def test_where_an_axis_is() -> None:
    axes = Axes(((0, None, 1),), ((1,),))
    assert axes.dim_of(axes.operands[0], 1) == 2 and axes.dim_of(axes.results[0], 0) is None
