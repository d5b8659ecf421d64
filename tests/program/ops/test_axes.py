"""Axes of an equation, and its parameters for one part; that parts give the whole is in test_axis_rules.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.program import compat
from memplan.program.ops import Axes, axes_of, local_params
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


@pytest.mark.parametrize(
    ("function", "name", "sizes"),
    [
        (lambda x: x.reshape(8, 2, 3), "new_sizes", (2, 2, 3)),
        (lambda x: jax.lax.slice(x, (0, 1), (8, 5)), "limit_indices", (2, 5)),
        (lambda x: jax.lax.broadcast_in_dim(x, (5, 8, 6), (1, 2)), "shape", (5, 2, 6)),
        (lambda x: jax.lax.dynamic_slice(x, (0, 1), (8, 2)), "slice_sizes", (2, 2)),
    ],
)
def test_sizes_in_parameters_are_those_of_the_part(function: Callable[..., Any], name: str, sizes: Any) -> None:
    eqn = only(function, X)
    axes = axes_of(eqn)
    assert axes is not None
    axis = axes.operands[0][0]
    assert axis is not None
    params = local_params(eqn, axes, axis, lambda size: size // 4)
    assert params == {**eqn.params, name: sizes}


def test_other_parameters_stay() -> None:
    eqn = only(lambda x: jax.lax.reduce_sum(x, (0,)), X)
    axes = axes_of(eqn)
    assert axes is not None and local_params(eqn, axes, 0, lambda size: size // 4) == eqn.params
