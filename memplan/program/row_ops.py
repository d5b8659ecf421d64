"""An equation on some rows of its operands alone: the rows of its results that they make.

Rows are counted along one axis of the equation (`axes`). Those before the first row of an array and behind its last
one exist in a window at its rim, too: `padding_value` says what an equation wants to find there.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from memplan.planning.graph import Rows, Span
from memplan.program import compat
from memplan.program.axes import Axes, local_params, shape_of
from memplan.program.bands import band_rows
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


def can_run_rows(eqn: compat.JaxprEqn) -> bool:
    """Not where the bits of one key are drawn, each by its number: whoever divides them counts on from part to part."""
    return eqn.primitive.name != "random_bits" or bool(shape_of(eqn.invars[0]))


def needed(axes: Axes, axis: int, span: Span) -> dict[int, Span]:
    """By position of an operand on the axis, the rows that these rows of the results need."""
    return {
        position: axes.rows_of(position, axis).of(*span)
        for position, side in enumerate(axes.operands)
        if axis in side
    }  # fmt: skip


def padding_value(eqn: compat.JaxprEqn, axes: Axes, axis: int, position: int, operands: Sequence[Any]) -> Any:
    """The value that stands for rows of an operand that are out of range; None if no valid row of a result reads them.

    Whatever those rows hold, NaN too, would otherwise enter all of a sum, and the rows of a result beside a padding.
    """
    how = axes.reduced.get(axis)
    if how is None and axis not in axes.carried and not axes.leave(position, axis, eqn):
        return None
    dtype = operands[position].dtype
    match eqn.primitive.name:
        case "pad":
            return operands[1]
        case "reduce_window":
            return operands[len(eqn.outvars) + position]
        case "reduce_window_max" | "cummax" | "cumlogsumexp":
            return extreme(dtype, "min")
        case "reduce_window_min" | "cummin":
            return extreme(dtype, "max")
        case "cumprod":
            return 1
        case "select_and_gather_add" | "select_and_scatter_add" if position == 1:
            return extreme(dtype, "min" if eqn.params["select_prim"].name == "ge" else "max")
        case "concatenate":
            return np.array(-0.0, dtype)  # to which everything can be added and stays what it is, 0.0 too
    return extreme(dtype, "min" if how == "max" else "max") if how in ("max", "min") else 0


def extreme(dtype: Any, which: str) -> Any:
    """The least ("min") or greatest value of a type."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return which == "max"
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(-np.inf if which == "min" else np.inf, dtype)
    return np.array(getattr(jnp.iinfo(dtype), which), dtype)


def _padding(rows: Rows, span: Span, given: Span) -> Span:
    """What is missing around the given rows of an operand, so that a window over them makes exactly the span."""
    start, stop = rows.window(*span)
    return given[0] * rows.dilation - start, stop - ((given[1] - 1) * rows.dilation + 1)


def _convolution(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    space = eqn.params["dimension_numbers"].lhs_spec[2:]
    dim = axes.dim_of(axes.operands[0], axis)
    if dim in space:
        eqn = _with_padding(eqn, space.index(dim), _padding(axes.rows_of(0, axis), span, spans[0]))
    return [_convolved(eqn, *operands)]


def _convolved(eqn: compat.JaxprEqn, image: Any, kernel: Any) -> Any:
    """The convolution, with one row more that is cut off along dimensions of a form on which XLA ends the process.

    XLA's swap of operands takes a dimension without padding, with `lhs_dilation == size == stride + 1`, for one of
    groups, and does not look whether the image has `size` rows as well, as groups have (`is_group_dim` in
    algebraic_simplifier.cc of jaxlib 0.11 and 0.12, conv_operand_swapper.cc behind it). It swaps where the kernel has
    more rows than the image along the other dimensions: so do slabs of few rows, and gradients of kernels.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    more = list[int]()
    for number, stride in enumerate(params["window_strides"]):
        rows, size = image.shape[numbers.lhs_spec[2 + number]], kernel.shape[numbers.rhs_spec[2 + number]]
        free = tuple(params["padding"][number]) == (0, 0) and params["rhs_dilation"][number] == 1
        if free and params["lhs_dilation"][number] == size == stride + 1 != rows:
            more.append(number)
            eqn = _with_padding(eqn, number, (0, stride))
    (made,) = compat.bind(eqn, [image, kernel])
    limits = list(made.shape)
    for number in more:
        limits[numbers.out_spec[2 + number]] -= 1
    return lax.slice(made, [0] * made.ndim, limits) if more else made


def _windowed(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    dim = axes.operands[0].index(axis)
    return compat.bind(_with_padding(eqn, dim, _padding(axes.rows_of(0, axis), span, spans[0])), operands)


def _selected(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    """Whole windows, cut to the rows asked for; those that no window reaches have no gradient."""
    dim = axes.results[0].index(axis)
    (made,) = compat.bind(_with_padding(eqn, dim, (0, 0)), operands)
    config = [(0, 0, 0)] * made.ndim
    config[dim] = (spans[1][0] - span[0], span[1] - spans[1][1], 0)
    return [lax.pad(made, jnp.zeros((), made.dtype), config)]


def _with_padding(eqn: compat.JaxprEqn, dim: int, padding: Span) -> compat.JaxprEqn:
    paddings = list(eqn.params["padding"])
    paddings[dim] = padding
    return eqn.replace(params={**eqn.params, "padding": tuple(paddings)})


def _pad(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    dim = axes.operands[0].index(axis)
    config = list(eqn.params["padding_config"])
    config[dim] = (*_padding(axes.rows_of(0, axis), span, spans[0]), config[dim][2])
    made = lax.pad(operands[0], operands[1], config)
    # XLA folds it into a convolution that reads it, which may have the form of `_convolved` then
    return [lax.optimization_barrier(made) if any(one[:2] == (0, 0) and one[2] for one in config) else made]


def _slice(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    dim = axes.operands[0].index(axis)
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    starts[dim], limits[dim] = 0, operands[0].shape[dim]
    params = {**eqn.params, "start_indices": tuple(starts), "limit_indices": tuple(limits)}
    return compat.bind(eqn.replace(params=params), operands)


def _concatenate(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    """Along its dimension the windows of all operands added: where one has a row, the others have the fill."""
    if axis != eqn.params["dimension"]:
        return compat.bind(eqn, operands)
    return [functools.reduce(operator.or_ if operands[0].dtype == bool else operator.add, operands)]


def _reshape(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    """The elements of an operand's rows in steps that its rows and those of the result are whole numbers of."""
    dim, rows = axes.results[0].index(axis), axes.rows_of(0, axis)
    outer, inner = eqn.params["new_sizes"][:dim], eqn.params["new_sizes"][dim + 1 :]
    steps = (spans[0][1] - spans[0][0]) * rows.dilation
    fine = inner if rows.stride == 1 else (math.prod(inner) // rows.stride,)
    low, high = (row * rows.stride - spans[0][0] * rows.dilation for row in span)
    cut = lax.slice_in_dim(lax.reshape(operands[0], (*outer, steps, *fine)), low, high, axis=dim)
    return [lax.reshape(cut, (*outer, span[1] - span[0], *inner))]


def _banded(
    eqn: compat.JaxprEqn, axes: Axes, axis: int, span: Span, spans: Mapping[int, Span], operands: list[Any]
) -> list[Any]:
    if axis != eqn.params["dim"]:
        return compat.bind(eqn, operands)
    x, weights = (*operands, None)[:2]
    return [band_rows(x, weights, span, spans[0], **eqn.params)]


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
    "banded": _banded,
    "squares_about_mean": _moments,
    "pad": _pad,
    "slice": _slice,
    "concatenate": _concatenate,
    "reshape": _reshape,
}
