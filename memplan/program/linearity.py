"""Sums that are not complete: which equations, applied to the terms of a sum, make terms of their result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from memplan.program import compat
from memplan.program.axes import shape_of


def is_linear(eqn: compat.JaxprEqn, partial: Sequence[bool], whole: Sequence[bool]) -> bool:
    """Applied to a term of each partial operand, and to the whole others, it makes a term of its result."""
    name = eqn.primitive.name
    if name in _LINEAR:
        return all(partial)
    if name == "dynamic_slice" or (name == "div" and _is_inexact(eqn.outvars[0])):  # whole numbers are cut
        return partial[0] and all(whole[1:])
    if name == "mul":
        shape = shape_of(eqn.outvars[0])
        return sum(partial) == 1 and sum(whole) == 1 and shape_of(eqn.invars[partial.index(True)]) == shape
    if name == "select_n":
        return whole[0] and all(partial[1:])
    if name == "pad":
        return partial[0] and isinstance(eqn.invars[1], compat.Literal) and eqn.invars[1].val == 0
    if name == "convert_element_type":
        return all(partial) and _keeps_all(compat.aval_of(eqn.invars[0]).dtype, compat.aval_of(eqn.outvars[0]).dtype)
    if name == "broadcast_in_dim":
        return all(partial) and math.prod(shape_of(eqn.outvars[0])) == math.prod(shape_of(eqn.invars[0]))
    return False


_LINEAR = {"neg", "reshape", "transpose", "squeeze", "rev", "copy", "name", "reduce_sum", "add", "add_any",
           "sub", "concatenate", "slice", "stack", "unstack"}  # fmt: skip


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(compat.aval_of(atom).dtype, jnp.inexact)


def _keeps_all(before: Any, after: Any) -> bool:
    """The conversion rounds nothing: a sum of what was rounded on each device is not the rounded sum."""
    floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return floats and jnp.promote_types(before, after) == after
