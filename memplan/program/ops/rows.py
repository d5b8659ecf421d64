"""Compute rows of an equation's results from rows of its operands.

Rows are counted along one axis of the equation (`axes`). A window at the border includes rows that
the array does not have; `padding_value` gives their value. A loop over slabs carries accumulated
sums and, for a cumulative equation, the row before the window.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from memplan.planning.graph import Span
from memplan.program import compat
from memplan.program.ops.axes import Axes, Reduction
from memplan.program.ops.moments import Moments
from memplan.program.ops.record import Eqn, Part, extreme, of


def local_params(eqn: Eqn, axes: Axes, axis: int, resized: Callable[[int], int]) -> dict[str, Any]:
    """The equation's parameters for one part, in which the axis has another size.

    Args:
      resized: the size in the parameter -> the size in the part.
    """
    params = dict(eqn.params)
    sizes_of = of(eqn).sizes
    if sizes_of is None:
        return params
    name, index_of = sizes_of
    index = index_of(eqn, axes, axis)
    if index is not None:
        sizes = list(params[name])
        sizes[index] = resized(sizes[index])
        params[name] = tuple(sizes)
    return params


def needed(axes: Axes, axis: int, span: Span) -> dict[int, Span]:
    """The rows of each operand on the axis, by position, that rows of the results need."""
    positions = [position for position, side in enumerate(axes.operands) if axis in side]
    return {position: axes.rows_of(position, axis).of(*span) for position in positions}


def run_rows(
    eqn: Eqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: Sequence[Any]
) -> list[Any]:
    """The rows of the results or, if the axis is reduced, their contribution to the results.

    Args:
      span: rows of the results; if the axis is reduced, of the last operand on it.
      spans: by position of an operand on the axis, the rows that `span` needs (`needed`).
      operands: the rows `spans` of operands on the axis, and the whole other operands.
    """
    rule = of(eqn).run_rows
    part = Part(eqn, axes, axis, span, spans)
    if rule is not None:
        return rule(part, list(operands))
    return part.bind(operands, **local_params(eqn, axes, axis, lambda _: span[1] - span[0]))


def padding_value(eqn: Eqn, axes: Axes, axis: int, position: int, operands: Sequence[Any]) -> Any:
    """The value for out-of-range rows of an operand; None if no valid row of a result reads them.

    Without it these rows, which may contain NaN, would enter a sum, or rows of the result near the
    border.
    """
    reduction = axes.reduced.get(axis)
    rule = of(eqn).padding_value
    if reduction is None and axis not in axes.carried and not axes.leave(position, axis, eqn):
        return None
    if rule is not None:
        return rule(eqn, position, operands)
    if reduction in ("max", "min"):
        return _identity_of_extreme(reduction, operands[position].dtype)
    return 0


def identity(reduction: Reduction, aval: Any) -> Any:
    """The identity of an accumulation."""
    if reduction == "sum":
        return jnp.zeros(aval.shape, _wide(aval.dtype))
    if reduction == "moments":
        return Moments.none(aval.shape, aval.dtype)
    return jnp.full(aval.shape, _identity_of_extreme(reduction, aval.dtype))


def _identity_of_extreme(reduction: str, dtype: Any) -> Any:
    """The least value for a maximum, the greatest for a minimum."""
    return extreme(dtype, "min" if reduction == "max" else "max")


def accumulate(reduction: Reduction, total: Any, part: Any) -> Any:
    """The accumulated value after one more slab."""
    if reduction == "sum":
        return total + part.astype(total.dtype)
    if reduction == "moments":
        return total.accumulate(part)
    return jnp.maximum(total, part) if reduction == "max" else jnp.minimum(total, part)


def row_before(eqn: Eqn, axes: Axes, axis: int) -> Any:
    """The identity, as the row before the first row of a cumulative result."""
    aval = compat.aval_of(eqn.outvars[0])
    sizes = zip(axes.results[0], aval.shape, strict=True)
    shape = [1 if dim_axis == axis else size for dim_axis, size in sizes]
    return jnp.full(shape, padding_value(eqn, axes, axis, 0, [aval]), _wide(aval.dtype))


def run_cumulative(eqn: Eqn, window: Any, before: Any, rows: int) -> tuple[Any, Any]:
    """Run a cumulative equation on a window of its operand.

    Args:
      before: the row of the result before the window (by `row_before`, then by this function).
      rows: distance to the next window; the window has at least as many rows.

    Returns:
      Rows of the result, and the row before the next window.
    """
    combined = of(eqn).accumulate
    assert combined is not None
    (within_window,) = compat.bind(eqn, [window.astype(before.dtype)])
    result = combined(before, within_window)
    rows_of_result = result.astype(window.dtype)
    return rows_of_result, lax.slice_in_dim(result, rows - 1, rows, axis=eqn.params["axis"])


def _wide(dtype: Any) -> Any:
    """float32 or wider, to accumulate numbers of half precision."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
