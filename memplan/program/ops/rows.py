"""Compute some rows of an equation's results from some rows of its operands.

Rows are counted along one axis of the equation (`axes`). A window at the rim includes rows before the first and after
the last of an array, which `padding_value` gives a value. A loop over slabs carries accumulated sums, and for a
cumulative equation the row before its window.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from memplan.planning.graph import Span
from memplan.program import compat
from memplan.program.ops.axes import Axes
from memplan.program.ops.moments import Moments
from memplan.program.ops.record import Eqn, Part, extreme, of


def local_params(eqn: Eqn, axes: Axes, axis: int, resized: Callable[[int], int]) -> dict[str, Any]:
    """The equation's parameters for one part, in which the axis's dimensions have other sizes."""
    params, known = dict(eqn.params), of(eqn).sizes
    if known is not None and (at := known[1](eqn, axes, axis)) is not None:
        sizes = list(params[known[0]])
        sizes[at] = resized(sizes[at])
        params[known[0]] = tuple(sizes)
    return params


def needed(axes: Axes, axis: int, span: Span) -> dict[int, Span]:
    """By position of an operand on the axis, the rows that these rows of the results need."""
    sides = enumerate(axes.operands)
    return {position: axes.rows_of(position, axis).of(*span) for position, side in sides if axis in side}


def run_rows(
    eqn: Eqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: Sequence[Any]
) -> list[Any]:
    """The rows of the results or, if the axis is reduced, their contribution to the results.

    Args:
      span: rows of the results; if the axis is reduced, of the last operand on it.
      spans: rows of the operands on the axis, by position: those that `span` needs (`needed`).
      operands: those rows, and the other operands whole.
    """
    rule, part = of(eqn).run_rows, Part(eqn, axes, axis, span, spans)
    if rule is not None:
        return rule(part, list(operands))
    return part.bind(operands, **local_params(eqn, axes, axis, lambda _: span[1] - span[0]))


def padding_value(eqn: Eqn, axes: Axes, axis: int, position: int, operands: Sequence[Any]) -> Any:
    """The value for out-of-range rows of an operand; None if no valid row of a result reads them.

    Otherwise these rows, which may hold NaN, would enter a whole sum, or the result's rows next to a padding.
    """
    how, rule = axes.reduced.get(axis), of(eqn).padding_value
    if how is None and axis not in axes.carried and not axes.leave(position, axis, eqn):
        return None
    if rule is not None:
        return rule(eqn, position, operands)
    return extreme(operands[position].dtype, "min" if how == "max" else "max") if how in ("max", "min") else 0


def identity(how: str, aval: Any) -> Any:
    """The identity of an accumulation."""
    if how == "sum":
        return jnp.zeros(aval.shape, _wide(aval.dtype))
    if how == "moments":
        return Moments.none(aval.shape, aval.dtype)
    return jnp.full(aval.shape, extreme(aval.dtype, "min" if how == "max" else "max"))


def accumulate(how: str, total: Any, more: Any) -> Any:
    """The accumulated value, with one more slab."""
    if how == "sum":
        return total + more.astype(total.dtype)
    if how == "moments":
        return total.accumulate(more)
    return jnp.maximum(total, more) if how == "max" else jnp.minimum(total, more)


def row_before(eqn: Eqn, axes: Axes, axis: int) -> Any:
    """The identity as the row of a cumulative result before its first one."""
    aval = compat.aval_of(eqn.outvars[0])
    shape = [1 if along == axis else size for along, size in zip(axes.results[0], aval.shape, strict=True)]
    return jnp.full(shape, padding_value(eqn, axes, axis, 0, [aval]), _wide(aval.dtype))


def run_cumulative(eqn: Eqn, window: Any, before: Any, rows: int) -> tuple[Any, Any]:
    """A cumulative equation on a window of its operand: rows of the result, and the row before the next window.

    Args:
      before: the row of the result before the window (`row_before`, or as returned here).
      rows: distance to the next window; the window has at least as many.
    """
    combined = of(eqn).accumulate
    assert combined is not None
    (own,) = compat.bind(eqn, [window.astype(before.dtype)])
    total = combined(before, own)
    return total.astype(window.dtype), lax.slice_in_dim(total, rows - 1, rows, axis=eqn.params["axis"])


def _wide(dtype: Any) -> Any:
    """float32 or wider, for the accumulation of halves."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
