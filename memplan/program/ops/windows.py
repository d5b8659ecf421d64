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
    """Windows along one dimension."""

    size: int  # rows of a window
    stride: int  # distance between windows
    padding: Span  # rows before the first, and after the last
    dilation: int  # distance between rows of the operand (`base_dilation`, `lhs_dilation`)
    apart: int  # distance between rows of a window (`window_dilation`, `rhs_dilation`)

    @property
    def reach(self) -> int:
        """Rows from the first to the last of a window."""
        return (self.size - 1) * self.apart + 1

    @property
    def rows(self) -> Rows:
        return Rows(self.stride, self.dilation, self.padding[0], self.reach)


def _with_padding(eqn: Eqn, number: int, padding: Span) -> tuple[Span, ...]:
    """The paddings of all dimensions, with one replaced."""
    paddings = tuple(eqn.params["padding"])
    return (*paddings[:number], padding, *paddings[number + 1 :])


def _windows(eqn: Eqn) -> list[Window]:
    """The windows along each dimension."""
    sizes = eqn.params["window_dimensions"]
    ones, none = (1,) * len(sizes), ((0, 0),) * len(sizes)
    defaults = {
        "window_strides": ones,
        "padding": none,
        "base_dilation": ones,
        "window_dilation": ones,
    }
    params = (eqn.params.get(name) or default for name, default in defaults.items())
    return [Window(*window_params) for window_params in zip(sizes, *params, strict=True)]


def _windowed(eqn: Eqn) -> Axes:
    """Every dimension; along a dimension of the window, a row reads its neighbours."""
    return with_rows(eqn, [window.rows for window in _windows(eqn)])


def _windowed_rows(part: Part, operands: list[Any]) -> list[Any]:
    return part.bind(
        operands,
        padding=_with_padding(part.eqn, part.dim(part.axes.operands), part.padding()),
    )


def _select_and_scatter(eqn: Eqn) -> Axes:
    """The gradient of a maximum: a row reads the windows that contain it, and all their rows."""
    rows: dict[tuple[int, int], Rows] = {}
    for dim, window in enumerate(_windows(eqn)):
        rows[0, dim] = Rows(1, window.stride, window.reach - 1 - window.padding[0], window.reach)
        rows[1, dim] = Rows(window.stride, 1, window.padding[0], window.reach, via=rows[0, dim])
    return with_rows(eqn, rows)


def _select_and_scatter_rows(part: Part, operands: list[Any]) -> list[Any]:
    """The gradients of whole windows, cut or padded to the span."""
    dim = part.dim(part.axes.results)
    low, high = part.span
    first, last = part.spans[1]
    (gradients,) = part.bind(operands, padding=_with_padding(part.eqn, dim, (0, 0)))
    config = [(0, 0, 0)] * gradients.ndim
    config[dim] = (first - low, high - last, 0)
    return [lax.pad(gradients, jnp.zeros((), gradients.dtype), config)]


def _initial_value(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    return operands[len(eqn.outvars) + position]


def _never_selected(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    """A value that loses every comparison for the compared array, zero for the other array."""
    if position != 1:
        return 0
    loser = least if eqn.params["select_prim"].name == "ge" else greatest
    return loser(eqn, position, operands)


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
