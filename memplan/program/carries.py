"""The carries of a loop over slabs: accumulated sums, and the row before a window of a cumulative operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from memplan.program import compat
from memplan.program.axes import Axes
from memplan.program.moments import Moments
from memplan.program.row_ops import extreme, padding_value


def identity(how: str, aval: Any) -> Any:
    """The identity of an accumulation."""
    if how == "sum":
        return jnp.zeros(aval.shape, _wide(aval.dtype))
    if how == "moments":
        return Moments.none(aval.shape, aval.dtype)
    return jnp.full(aval.shape, extreme(aval.dtype, "min" if how == "max" else "max"))


def accumulate(how: str, total: Any, more: Any) -> Any:
    """The accumulated value with one more slab."""
    if how == "sum":
        return total + more.astype(total.dtype)
    if how == "moments":
        return total.accumulate(more)
    return jnp.maximum(total, more) if how == "max" else jnp.minimum(total, more)


def row_before(eqn: compat.JaxprEqn, axes: Axes, axis: int) -> Any:
    """The row of a cumulative equation's result before its first one: what changes nothing."""
    aval = compat.aval_of(eqn.outvars[0])
    shape = [1 if along == axis else size for along, size in zip(axes.results[0], aval.shape, strict=True)]
    return jnp.full(shape, padding_value(eqn, axes, axis, 0, [aval]), _wide(aval.dtype))


def run_cumulative(eqn: compat.JaxprEqn, window: Any, before: Any, rows: int) -> tuple[Any, Any]:
    """A cumulative equation on a window of its operand: these rows of the result, and the row before the next window.

    Args:
      before: the row of the result before the window (`row_before`, or as it is given here).
      rows: by so many the next window lies further on; the window has them at least.
    """
    (own,) = compat.bind(eqn, [window.astype(before.dtype)])
    total = _COMBINED[eqn.primitive.name](before, own)
    return total.astype(window.dtype), lax.slice_in_dim(total, rows - 1, rows, axis=eqn.params["axis"])


_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}


def _wide(dtype: Any) -> Any:
    """Halves are added up in float32."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
