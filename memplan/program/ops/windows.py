"""Reductions over windows, and their derivatives."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memplan.planning.graph import Rows, Span
from memplan.program.ops.axes import Axes, with_rows
from memplan.program.ops.record import Eqn, Part, Primitive, greatest, largest, least, register


class Window(NamedTuple):
    """Windows along one dimension, in XLA's words."""

    size: int
    stride: int
    padding: Span
    dilation: int
    apart: int

    @property
    def reach(self) -> int:
        return (self.size - 1) * self.apart + 1

    @property
    def rows(self) -> Rows:
        return Rows(self.stride, self.dilation, self.padding[0], self.reach)


def _with_padding(eqn: Eqn, number: int, padding: Span) -> tuple[Span, ...]:
    """The paddings with this one replaced."""
    given = tuple(eqn.params["padding"])
    return (*given[:number], padding, *given[number + 1 :])


def _windows(eqn: Eqn) -> list[Window]:
    """By dimension."""
    sizes = eqn.params["window_dimensions"]
    ones, none = (1,) * len(sizes), ((0, 0),) * len(sizes)
    defaults = {"window_strides": ones, "padding": none, "base_dilation": ones, "window_dilation": ones}
    rest = (eqn.params.get(name) or default for name, default in defaults.items())
    return [Window(*one) for one in zip(sizes, *rest, strict=True)]


def _windowed(eqn: Eqn) -> Axes:
    """Every dimension; along dimensions of the window, rows read their neighbours."""
    return with_rows(eqn, [window.rows for window in _windows(eqn)])


def _windowed_rows(part: Part, operands: list[Any]) -> list[Any]:
    return part.bind(operands, padding=_with_padding(part.eqn, part.dim(part.axes.operands), part.padding()))


def _select_and_scatter(eqn: Eqn) -> Axes:
    """The gradient of a maximum: a row reads the windows that contain it (their source), and all their rows."""
    rows: dict[tuple[int, int], Rows] = {}
    for dim, window in enumerate(_windows(eqn)):
        rows[0, dim] = Rows(1, window.stride, window.reach - 1 - window.padding[0], window.reach)
        rows[1, dim] = Rows(window.stride, 1, window.padding[0], window.reach, via=rows[0, dim])
    return with_rows(eqn, rows)


def _select_and_scatter_rows(part: Part, operands: list[Any]) -> list[Any]:
    """Whole windows, cut to the requested rows; rows that no window contains have no gradient."""
    dim, (low, high), (first, last) = part.dim(part.axes.results), part.span, part.spans[1]
    (made,) = part.bind(operands, padding=_with_padding(part.eqn, dim, (0, 0)))
    config = [(0, 0, 0)] * made.ndim
    config[dim] = (first - low, high - last, 0)
    return [lax.pad(made, jnp.zeros((), made.dtype), config)]


def _initial_value(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    return operands[len(eqn.outvars) + position]


def _never_selected(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    """The loser of every comparison for the compared array, zero for the array that is selected from."""
    if position != 1:
        return 0
    return (least if eqn.params["select_prim"].name == "ge" else greatest)(eqn, position, operands)


def _flops(eqn: Eqn) -> float:
    return float(math.prod(eqn.params.get("window_dimensions", ()))) * largest(eqn.outvars)


_reduced = partial(Primitive, axes=_windowed, run_rows=_windowed_rows)
register("reduce_window_sum", _reduced(flops=_flops))
register("reduce_window_max", _reduced(flops=_flops, padding_value=least))
register("reduce_window_min", _reduced(padding_value=greatest))
register("reduce_window", _reduced(padding_value=_initial_value))
register("select_and_gather_add", _reduced(flops=_flops, padding_value=_never_selected))
_scattered = partial(Primitive, axes=_select_and_scatter, run_rows=_select_and_scatter_rows)
register("select_and_scatter_add", _scattered(flops=_flops, padding_value=_never_selected))
