"""The axes of primitives whose rows read other rows of their operands than their own: rules of the table `axis_rules`.

A rule says so with `Rows`, by operand and axis; `row_ops` computes these primitives on some of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from memplan.planning.graph import Rows
from memplan.program import compat
from memplan.program.axes import Axes, Axis, Reduction, shape_of


class Window(NamedTuple):
    """How windows lie along one dimension, in XLA's words."""

    size: int
    stride: int
    padding: tuple[int, int]
    dilation: int
    apart: int

    @property
    def reach(self) -> int:
        return (self.size - 1) * self.apart + 1

    @property
    def rows(self) -> Rows:
        return Rows(self.stride, self.dilation, self.padding[0], self.reach)


_BATCH, _FEATURES_IN, _FEATURES_OUT, _SPACE = 0, 1, 2, 3


def convolution(eqn: compat.JaxprEqn) -> Axes:
    """Batch, input features (summed over), output features, and space; of a grouped one the groups stay together.

    In space the image goes with the result, or, where the filter is the larger, with the filter and is summed over: so
    is the gradient of a filter written.
    """
    numbers = eqn.params["dimension_numbers"]
    ungrouped = eqn.params["feature_group_count"] == 1
    one_batch = eqn.params["batch_group_count"] == 1
    rank = len(numbers.lhs_spec)
    sides: tuple[list[Axis], ...] = tuple([None] * rank for _ in range(3))
    left, right, out = sides
    if one_batch:
        left[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = _BATCH
    if ungrouped:
        left[numbers.lhs_spec[1]] = right[numbers.rhs_spec[1]] = _FEATURES_IN
    if ungrouped and one_batch:
        right[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = _FEATURES_OUT
    reduced: dict[int, Reduction] = {_FEATURES_IN: "sum"} if ungrouped else {}
    rows: dict[tuple[int, int], Rows] = {}
    made = shape_of(eqn.outvars[0])
    for number, window in enumerate(_filter_windows(eqn)):
        of_left, of_right, of_out = (
            spec[2 + number] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
        )
        axis = left[of_left] = _SPACE + number
        if window.size > made[of_out]:
            right[of_right], reduced[axis] = axis, "sum"
            rows[0, axis] = window._replace(size=made[of_out], stride=window.apart, apart=window.stride).rows
        else:
            out[of_out] = axis
            rows[0, axis] = window.rows
    return Axes((tuple(left), tuple(right)), (tuple(out),), reduced, rows=rows)


def _filter_windows(eqn: compat.JaxprEqn) -> list[Window]:
    """By dimension of space."""
    sizes = [shape_of(eqn.invars[1])[dim] for dim in eqn.params["dimension_numbers"].rhs_spec[2:]]
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    return [Window(*one) for one in zip(sizes, *(eqn.params[name] for name in names), strict=True)]


def windowed(eqn: compat.JaxprEqn) -> Axes:
    """Every dimension; over those where the window reaches, rows read their neighbours."""
    return _with_rows(eqn, [window.rows for window in _windows(eqn)])


def _windows(eqn: compat.JaxprEqn) -> list[Window]:
    """By dimension, of an equation that reduces over windows."""
    sizes = eqn.params["window_dimensions"]
    ones, none = (1,) * len(sizes), ((0, 0),) * len(sizes)
    defaults = {"window_strides": ones, "padding": none, "base_dilation": ones, "window_dilation": ones}
    rest = (eqn.params.get(name) or default for name, default in defaults.items())
    return [Window(*one) for one in zip(sizes, *rest, strict=True)]


def select_and_scatter(eqn: compat.JaxprEqn) -> Axes:
    """The gradient of a maximum: a row reads the windows that it is in (their source), and all rows that they reach."""
    rows: dict[tuple[int, int], Rows] = {}
    for dim, window in enumerate(_windows(eqn)):
        rows[0, dim] = Rows(1, window.stride, window.reach - 1 - window.padding[0], window.reach)
        rows[1, dim] = Rows(window.stride, 1, window.padding[0], window.reach, via=rows[0, dim])
    return _sides(eqn, rows)


def pad(eqn: compat.JaxprEqn) -> Axes:
    return _with_rows(eqn, [Rows(1, within + 1, low, 1) for low, _, within in eqn.params["padding_config"]])


def slice_(eqn: compat.JaxprEqn) -> Axes:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return _with_rows(eqn, [Rows(stride, 1, -start, 1) for start, stride in zip(starts, strides, strict=True)])


def banded(eqn: compat.JaxprEqn) -> Axes:
    """Every dimension; along its own rows read the rows of their band, and the weights go with them."""
    dim = eqn.params["dim"]
    found = _sides(eqn, {(0, dim): eqn.params["rows"]})
    weights = [(dim, None) for _ in eqn.invars[1:]]
    return replace(found, operands=(found.operands[0], *weights))


def concatenate(eqn: compat.JaxprEqn) -> Axes:
    """Along its dimension every operand begins behind those before it."""
    dim = eqn.params["dimension"]
    sizes = [shape_of(atom)[dim] for atom in eqn.invars]
    offsets = accumulate(sizes[:-1], initial=0)
    return _sides(eqn, {(position, dim): Rows(before=offset) for position, offset in enumerate(offsets)})


def _with_rows(eqn: compat.JaxprEqn, rows: Sequence[Rows]) -> Axes:
    """One axis per dimension, along which all operands (but scalars) are read by the same rows."""
    arrays = [position for position, atom in enumerate(eqn.invars) if len(shape_of(atom)) == len(rows)]
    return _sides(eqn, {(position, dim): one for dim, one in enumerate(rows) for position in arrays})


def _sides(eqn: compat.JaxprEqn, rows: Mapping[tuple[int, int], Rows]) -> Axes:
    """One axis per dimension."""
    names = tuple(range(len(shape_of(eqn.outvars[0]))))
    operands = tuple(names if len(shape_of(atom)) == len(names) else () for atom in eqn.invars)
    return Axes(operands, tuple(names for _ in eqn.outvars), rows=rows)


def reshape(eqn: compat.JaxprEqn) -> Axes | None:
    """In every group of dimensions that become one another, the outermost can be divided: its blocks stay together."""
    if eqn.params.get("dimensions") is not None:
        return None
    before, after = shape_of(eqn.invars[0]), tuple(eqn.params["new_sizes"])
    operand: list[Axis] = [None] * len(before)
    result: list[Axis] = [None] * len(after)
    rows: dict[tuple[int, int], Rows] = {}
    for number, (left, right) in enumerate(_groups(before, after)):
        heads = next((d for d in left if before[d] > 1), None), next((d for d in right if after[d] > 1), None)
        if heads[0] is not None and heads[1] is not None:
            operand[heads[0]] = result[heads[1]] = number
            rows[0, number] = _blocks(before[heads[0]], after[heads[1]])
    return Axes((tuple(operand),), (tuple(result),), rows=rows)


def _blocks(before: int, after: int) -> Rows:
    """The same elements in so many rows as in so many others: a row reads those that it shares elements with."""
    stride, dilation = before // gcd(before, after), after // gcd(before, after)
    return Rows(stride, dilation, dilation - 1, dilation - 1 + stride)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest runs of dimensions with the same number of elements, in order."""
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(before):
                a, left, i = a * before[i], [*left, i], i + 1
            elif j < len(after):
                b, right, j = b * after[j], [*right, j], j + 1
            else:
                return
        yield left, right
