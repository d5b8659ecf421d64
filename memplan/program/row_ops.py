"""An equation on some rows of its operands alone: the rows of its results that they make.

Rows are counted along one axis of the equation (`axes`). Those before the first row of an array and behind its last
one exist in a window at its rim, too: `fill_of` says what an equation wants to find there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from memplan.planning.rows import Span
from memplan.program import compat
from memplan.program.axes import Axes, local_params
from memplan.program.moments import Moments


def run_rows(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: Sequence[Any]
) -> list[Any]:
    """The rows of the results, or where the axis is reduced what these rows add to them.

    Args:
      span: rows of the results; where the axis is reduced, of the last operand on it.
      spans: rows of the operands on the axis, by position: what `span` needs of them (`needed`).
      operands: those rows, and the other operands whole.
    """
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn, axes, axis, span, spans, list(operands))
    params = local_params(eqn, axes, axis, lambda _: span[1] - span[0])
    return compat.bind(eqn.replace(params=params), operands)


def needed(axes: Axes, axis: int, span: Span) -> dict[int, Span]:
    """By position of an operand on the axis, the rows that these rows of the results need."""
    return {
        position: axes.rows_of(position, axis).of(*span)
        for position, side in enumerate(axes.operands)
        if axis in side
    }  # fmt: skip


def fill_of(eqn: compat.JaxprEqn, axes: Axes, axis: int, position: int, operands: Sequence[Any]) -> Any:
    """What the equation has in place of rows of an operand that do not exist; None where nothing reads them."""
    dtype = operands[position].dtype
    match eqn.primitive.name:
        case "pad":
            return operands[1]
        case "reduce_window":
            return operands[1]
        case "reduce_window_max" | "select_and_gather_add":
            return extreme(dtype, "min")
        case "reduce_window_min":
            return extreme(dtype, "max")
        case "select_and_scatter_add":
            return extreme(dtype, "min" if eqn.params["select_prim"].name == "ge" else "max") if position else 0
        case "conv_general_dilated" | "reduce_window_sum":
            return 0
    how = axes.reduced.get(axis)
    if how is None:
        return None
    return 0 if how in ("sum", "moments") else extreme(dtype, "min" if how == "max" else "max")


def extreme(dtype: Any, which: str) -> Any:
    """The least ("min") or greatest value of a type."""
    if dtype == bool:
        return which == "max"
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(-np.inf if which == "min" else np.inf, dtype)
    return np.array(getattr(jnp.iinfo(dtype), which), dtype)


def _padding(axes: Axes, axis: int, position: int, span: Span, given: Span) -> Span:
    """What is missing around the given rows of an operand, so that a window over them makes exactly the span."""
    rows = axes.rows_of(position, axis)
    first = span[0] * rows.stride - rows.before
    last = (span[1] - 1) * rows.stride - rows.before + rows.reach
    low = given[0] * rows.dilation - first
    return low, last - ((given[1] - 1) * rows.dilation + 1)


def _convolution(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    dim = axes.dim_of(axes.operands[0], axis)
    if dim not in numbers.lhs_spec[2:]:
        return compat.bind(eqn, operands)
    padding = list(eqn.params["padding"])
    padding[numbers.lhs_spec[2:].index(dim)] = _padding(axes, axis, 0, span, spans[0])
    return compat.bind(eqn.replace(params={**eqn.params, "padding": tuple(padding)}), operands)


def _windowed(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    dim = axes.operands[0].index(axis)
    padding = list(eqn.params["padding"])
    padding[dim] = _padding(axes, axis, 0, span, spans[0])
    return compat.bind(eqn.replace(params={**eqn.params, "padding": tuple(padding)}), operands)


def _selected(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    """Whole windows, of which the rows asked for are cut out."""
    dim = axes.results[0].index(axis)
    padding = list(eqn.params["padding"])
    padding[dim] = (0, 0)
    made = compat.bind(eqn.replace(params={**eqn.params, "padding": tuple(padding)}), operands)
    low = span[0] - spans[1][0]
    return [lax.slice_in_dim(one, low, low + span[1] - span[0], axis=dim) for one in made]


def _pad(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    dim = axes.operands[0].index(axis)
    config = list(eqn.params["padding_config"])
    config[dim] = (*_padding(axes, axis, 0, span, spans[0]), config[dim][2])
    return [lax.pad(operands[0], operands[1], config)]


def _slice(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    dim = axes.operands[0].index(axis)
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    starts[dim], limits[dim] = 0, operands[0].shape[dim]
    params = {**eqn.params, "start_indices": tuple(starts), "limit_indices": tuple(limits)}
    return compat.bind(eqn.replace(params=params), operands)


def _reshape(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    """Whole blocks, of which the rows asked for are cut out."""
    dim, rows = axes.results[0].index(axis), axes.rows_of(0, axis)
    low, high = (bound * rows.dilation // rows.stride for bound in spans[0])
    params = local_params(eqn, axes, axis, lambda _: high - low)
    made = compat.bind(eqn.replace(params=params), operands)
    return [lax.slice_in_dim(one, span[0] - low, span[1] - low, axis=dim) for one in made]


def _moments(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    """What these rows add where the axis is reduced: their count and mean too."""
    if axis not in axes.reduced:
        return compat.bind(eqn, operands)
    return [Moments.of(operands[0], operands[1], eqn.params["axes"])]


_RULES: dict[str, Callable[..., list[Any]]] = {
    "conv_general_dilated": _convolution,
    "reduce_window_max": _windowed,
    "reduce_window_min": _windowed,
    "reduce_window_sum": _windowed,
    "reduce_window": _windowed,
    "select_and_gather_add": _windowed,
    "select_and_scatter_add": _selected,
    "squares_about_mean": _moments,
    "pad": _pad,
    "slice": _slice,
    "reshape": _reshape,
}
