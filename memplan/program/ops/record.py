"""The facts of a primitive: one record, registered in the file of its family.

A primitive without a record is a kernel that needs its operands whole. This is correct, and memplan
reports it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from memplan.hardware.efficiency import MatrixShape
from memplan.hardware.library_calls import LibraryCall
from memplan.planning.graph import Fusion, Span
from memplan.program import compat
from memplan.program.ops.axes import Axes

Eqn = compat.JaxprEqn


@dataclass(frozen=True)
class Part:
    """A window of rows of an equation's results, along one of its axes."""

    eqn: Eqn
    axes: Axes
    axis: int
    span: Span  # rows of the results; if the axis is reduced, of the last operand on it
    spans: Mapping[int, Span]  # by position of an operand on the axis, its rows

    def dim(self, side: Sequence[tuple[int | None, ...]]) -> int:
        """The dimension of the first operand, or result, that is on the axis."""
        return side[0].index(self.axis)

    def padding(self) -> Span:
        """Padding for the first operand's rows, with which a windowed operation gives the span."""
        rows = self.axes.rows_of(0, self.axis)
        low, high = self.spans[0]
        start, stop = rows.window(*self.span)
        return low * rows.dilation - start, stop - ((high - 1) * rows.dilation + 1)

    def bind(self, operands: Sequence[Any], **params: Any) -> list[Any]:
        """The primitive applied to other operands, with some parameters replaced."""
        return compat.bind(self.eqn.replace(params={**self.eqn.params, **params}), operands)


@dataclass(frozen=True)
class Primitive:
    """The facts of one primitive; the defaults hold for any."""

    fusion: Fusion = "kernel"  # how XLA fuses it
    moves_elements: bool = False  # its fusion is "elementwise", but it moves elements
    # floating-point operations of one execution, or per element of its largest array
    flops: int | Callable[[Eqn], float] = 1
    # the shape of its products, if its flops run at the rate of the matrix units
    matrix_shape: Callable[[Eqn], MatrixShape] | None = None
    # the routines of libraries that it calls
    library_calls: Callable[[Eqn], tuple[LibraryCall, ...]] = lambda eqn: ()
    recomputable: bool = True  # a second run gives the same result and has no other effect
    # its axes, along which slabs can be computed; None if it has none
    axes: Callable[[Eqn], Axes | None] = lambda eqn: None
    # name of the parameter with sizes, and a function that gives the index of an axis's size in it
    sizes: tuple[str, Callable[[Eqn, Axes, int], int | None]] | None = None
    can_run_rows: Callable[[Eqn], bool] = lambda eqn: True  # may slabs follow its axes?
    # computes rows of the results from rows of the operands; None: the same equation with other
    # `sizes`
    run_rows: Callable[[Part, list[Any]], list[Any]] | None = None
    # equation, position of an operand, operands -> the value of out-of-range rows; None: zero, or
    # the identity of the reduction
    padding_value: Callable[[Eqn, int, Sequence[Any]], Any] | None = None
    # equation, position of an operand -> dimensions in which a loop over slabs holds it reversed
    # (each trip reverses it again)
    reversed_dims: Callable[[Eqn, int], tuple[int, ...]] = lambda eqn, position: ()
    accumulate: Callable[[Any, Any], Any] | None = None  # combines two rows of a cumulative result


RECORDS: dict[str, Primitive] = {}
_DEFAULT = Primitive()


def register(names: str, primitive: Primitive) -> None:
    """Register one record for several primitives, whose names are separated by spaces."""
    for name in names.split():
        assert name not in RECORDS, name
        RECORDS[name] = primitive


def of(eqn: Eqn) -> Primitive:
    """The record of an equation's primitive."""
    return RECORDS.get(eqn.primitive.name, _DEFAULT)


def of_operand(eqn: Eqn, axes: Axes, axis: int) -> int | None:
    """The index of an axis in sizes of the first operand."""
    return axes.dim_of(axes.operands[0], axis)


def of_result(eqn: Eqn, axes: Axes, axis: int) -> int | None:
    """The index of an axis in sizes of the first result."""
    return axes.dim_of(axes.results[0], axis)


def axes_of(eqn: Eqn) -> Axes | None:
    """The axes of an equation; None if it has none."""
    return of(eqn).axes(eqn)


def largest(atoms: Sequence[Any]) -> int:
    """Elements of the largest array."""
    return max((math.prod(getattr(atom.aval, "shape", ())) for atom in atoms), default=0)


def extreme(dtype: Any, bound: str) -> Any:
    """The least ("min") or greatest ("max") value of a type."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return bound == "max"
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(-np.inf if bound == "min" else np.inf, dtype)
    return np.array(getattr(jnp.iinfo(dtype), bound), dtype)


def least(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    return extreme(operands[position].dtype, "min")


def greatest(eqn: Eqn, position: int, operands: Sequence[Any]) -> Any:
    return extreme(operands[position].dtype, "max")
