"""An axis through a program: what may not be on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.program.flatten import flatten
from memplan.program.slab_axis import slab_axis

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def dropped(x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0.0)


@pytest.mark.parametrize(
    ("function", "blocked", "along"),
    [
        (lambda x: x + x.T, {"add"}, {"transpose"}),  # one operand by rows, the other by columns
        (dropped, {"random_bits"}, {"select_n"}),  # a bit is drawn by its number in the whole
    ],
)
def test_what_cannot_be_made_by_slabs_is_blocked(function: Callable[..., Any], blocked: Any, along: Any) -> None:
    closed = flatten(jax.make_jaxpr(function)(X))
    axis = slab_axis(closed, closed.jaxpr.invars[0], 0)
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert {names[number] for number in axis.blocked} == blocked
    assert along <= {names[number] for number in axis.equations}
