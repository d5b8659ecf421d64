"""Primitives that move elements, or only change their layout."""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np
from jax import lax

from memplan.planning.graph import Rows
from memplan.program.ops.axes import Axes, Axis, parallel, shape_of, with_rows, without
from memplan.program.ops.record import Eqn, Part, Primitive, of_operand, of_result, register

_view = functools.partial(Primitive, "view")
_moved = functools.partial(Primitive, "elementwise", moves_elements=True)


def _transpose(eqn: Eqn) -> Axes:
    order = tuple(eqn.params["permutation"])
    return Axes((tuple(range(len(order))),), (order,))


def _broadcast_in_dim(eqn: Eqn) -> Axes:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    operand_shape = shape_of(eqn.invars[0])
    pairs = zip(dims, operand_shape, strict=True)
    operand = tuple(dim if size == shape[dim] else None for dim, size in pairs)
    sizes = tuple(() for _ in eqn.invars[1:])
    return Axes((operand, *sizes), (tuple(range(len(shape))),))


def _new(eqn: Eqn) -> Axes:
    return Axes(tuple(() for _ in eqn.invars), (tuple(range(len(eqn.params["shape"]))),))


# A reversal is no view. It counts as one since XLA's pattern for the gradient of a convolution
# needs it next to the convolution.
register("rev", _view(axes=lambda eqn: parallel(eqn, eqn.params["dimensions"])))
register("create_token expand_dims", _view())
register("squeeze", _view(axes=lambda eqn: without(eqn, eqn.params["dimensions"])))
register("broadcast_in_dim", _view(axes=_broadcast_in_dim, sizes=("shape", of_result)))
register("empty iota", _view(axes=_new, sizes=("shape", of_result)))
register("transpose", _moved(axes=_transpose))


def _stack(eqn: Eqn) -> Axes:
    """The new dimension cannot be divided: its parts are different operands."""
    axis = eqn.params["axis"]
    names = tuple(range(len(shape_of(eqn.invars[0]))))
    return Axes(tuple(names for _ in eqn.invars), ((*names[:axis], None, *names[axis:]),))


def _unstack(eqn: Eqn) -> Axes:
    axis = eqn.params["axis"]
    names = tuple(range(len(shape_of(eqn.invars[0])) - 1))
    return Axes(((*names[:axis], None, *names[axis:]),), tuple(names for _ in eqn.outvars))


register("split", _moved(axes=lambda eqn: parallel(eqn, [eqn.params["axis"]])))
register("stack", Primitive(axes=_stack))
register("unstack", Primitive(axes=_unstack))


def _tile(eqn: Eqn) -> Axes:
    return parallel(eqn, [dim for dim, count in enumerate(eqn.params["reps"]) if count != 1])


register("tile", Primitive(axes=_tile))


def _pad(eqn: Eqn) -> Axes:
    return with_rows(
        eqn,
        [Rows(1, within + 1, low, 1) for low, _, within in eqn.params["padding_config"]],
    )


def _pad_rows(part: Part, operands: list[Any]) -> list[Any]:
    dim = part.dim(part.axes.operands)
    config = list(part.eqn.params["padding_config"])
    config[dim] = (*part.padding(), config[dim][2])
    padded = lax.pad(operands[0], operands[1], config)
    # XLA folds the padding into a convolution that reads it, which may then have the form on which
    # XLA aborts (`contractions`)
    is_risky = any(padding[:2] == (0, 0) and padding[2] for padding in config)
    return [lax.optimization_barrier(padded) if is_risky else padded]


def _slice(eqn: Eqn) -> Axes:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return with_rows(
        eqn,
        [Rows(stride, 1, -start, 1) for start, stride in zip(starts, strides, strict=True)],
    )


def _slice_rows(part: Part, operands: list[Any]) -> list[Any]:
    dim = part.dim(part.axes.operands)
    starts = list(part.eqn.params["start_indices"])
    limits = list(part.eqn.params["limit_indices"])
    starts[dim] = 0
    limits[dim] = operands[0].shape[dim]
    return part.bind(operands, start_indices=tuple(starts), limit_indices=tuple(limits))


def _concatenate(eqn: Eqn) -> Axes:
    """Along its dimension, every operand begins after the previous one."""
    dim = eqn.params["dimension"]
    offsets = accumulate((shape_of(atom)[dim] for atom in eqn.invars[:-1]), initial=0)
    return with_rows(
        eqn,
        {(position, dim): Rows(before=offset) for position, offset in enumerate(offsets)},
    )


def _concatenate_rows(part: Part, operands: list[Any]) -> list[Any]:
    """Along its dimension, the sum of all operands' windows.

    If one operand has a row, the others have the padding value there.
    """
    if part.axis != part.eqn.params["dimension"]:
        return part.bind(operands)
    add = operator.or_ if operands[0].dtype == bool else operator.add
    return [functools.reduce(add, operands)]


def _negative_zero(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    """The padding value that leaves every value unchanged when added, even 0.0."""
    return np.array(-0.0, operands[position].dtype)


def _reshape(eqn: Eqn) -> Axes | None:
    """In every group of dimensions that map to one another, the outermost can be divided."""
    if eqn.params.get("dimensions") is not None:
        return None
    before = shape_of(eqn.invars[0])
    after = tuple(eqn.params["new_sizes"])
    operand: list[Axis] = [None] * len(before)
    result: list[Axis] = [None] * len(after)
    rows: dict[tuple[int, int], Rows] = {}
    for axis, (dims_before, dims_after) in enumerate(_groups(before, after)):
        head_before = next((dim for dim in dims_before if before[dim] > 1), None)
        head_after = next((dim for dim in dims_after if after[dim] > 1), None)
        if head_before is None or head_after is None:
            continue
        operand[head_before] = axis
        result[head_after] = axis
        # a row reads all rows that it shares elements with
        common = gcd(before[head_before], after[head_after])
        stride = before[head_before] // common
        dilation = after[head_after] // common
        rows[0, axis] = Rows(stride, dilation, dilation - 1, dilation - 1 + stride)
    return Axes((tuple(operand),), (tuple(result),), rows=rows)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest runs of dimensions with the same number of elements, in order."""
    i = j = 0
    while i < len(before) and j < len(after):
        dims_before, dims_after = [i], [j]
        size_before, size_after = before[i], after[j]
        i, j = i + 1, j + 1
        while size_before != size_after:
            if size_before < size_after and i < len(before):
                size_before *= before[i]
                dims_before.append(i)
                i += 1
            elif j < len(after):
                size_after *= after[j]
                dims_after.append(j)
                j += 1
            else:
                return
        yield dims_before, dims_after


def _reshape_rows(part: Part, operands: list[Any]) -> list[Any]:
    """Rows of the result, sliced in units that divide an operand's row and a result's row."""
    dim = part.dim(part.axes.results)
    rows = part.axes.rows_of(0, part.axis)
    sizes = part.eqn.params["new_sizes"]
    first, last = part.spans[0]
    outer = sizes[:dim]
    inner = sizes[dim + 1 :]
    fine = inner if rows.stride == 1 else (math.prod(inner) // rows.stride,)
    low, high = (row * rows.stride - first * rows.dilation for row in part.span)
    units = lax.reshape(operands[0], (*outer, (last - first) * rows.dilation, *fine))
    window = lax.slice_in_dim(units, low, high, axis=dim)
    return [lax.reshape(window, (*outer, part.span[1] - part.span[0], *inner))]


register(
    "pad",
    _moved(
        axes=_pad,
        run_rows=_pad_rows,
        padding_value=lambda eqn, position, operands: operands[1],
    ),
)
register("slice", _moved(axes=_slice, sizes=("limit_indices", of_operand), run_rows=_slice_rows))
register(
    "concatenate",
    _moved(axes=_concatenate, run_rows=_concatenate_rows, padding_value=_negative_zero),
)
register("reshape", _view(axes=_reshape, sizes=("new_sizes", of_result), run_rows=_reshape_rows))
