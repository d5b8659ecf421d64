"""Products with banded matrices, such as those that resize images.

Every row of the result reads a few rows near its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from memplan.planning.graph import Rows, Span
from memplan.program import compat
from memplan.program.ops.axes import Axes, shape_of, with_rows
from memplan.program.ops.record import Eqn, Part, Primitive, register

# A row of the result reads at most so many rows. Each is another term to add up.
MOST_TAPS = 64


@dataclass(frozen=True)
class Band:
    """The nonzero band of a matrix (result rows x operand rows)."""

    rows: Rows  # the operand rows that each row of the result reads
    # (result rows, taps): weights of the operand rows from `first_of` on; zero for rows out of
    # range
    weights: np.ndarray

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        result_rows: np.ndarray,
        operand_rows: np.ndarray,
        values: np.ndarray,
    ) -> Band | None:
        """The band of a matrix; None if it is wide, or as wide as the matrix.

        Args:
          shape: (result rows, operand rows).
          result_rows, operand_rows, values: indices and values of the nonzero elements.
        """
        if not len(values):
            return None
        common = math.gcd(*shape)
        stride = shape[1] // common
        dilation = shape[0] // common
        distances = result_rows * stride - operand_rows * dilation
        reach = int(distances.max() - distances.min()) + 1
        rows = Rows(stride, dilation, int(distances.max()), reach)
        if not taps_of(rows) <= min(MOST_TAPS, shape[1] - 1):
            return None
        weights = np.zeros((shape[0], taps_of(rows)), values.dtype)
        weights[result_rows, operand_rows - first_of(rows, result_rows)] = values
        return cls(rows, weights)

    @property
    def takes(self) -> bool:
        """Is every row of the result a copy of one operand row?"""
        return self.weights.shape[1] == 1 and bool((self.weights == 1).all())


def taps_of(rows: Rows) -> int:
    """The most rows that one row of the result reads."""
    return (rows.reach - 1) // rows.dilation + 1


def first_of(rows: Rows, row: Any) -> Any:
    """The first operand row that a result row reads."""
    return -((rows.before - row * rows.stride) // rows.dilation)


def band_rows(
    x: Any,
    weights: Any,
    span: Span,
    operand_span: Span,
    *,
    dim: int,
    rows: Rows,
    dtype: Any,
    size: int | None = None,
) -> Any:
    """The rows `span` of the result of `banded`.

    Args:
      x: the rows `operand_span` of the operand.
      weights: the rows `span` of the weights, or None.
    """
    first = first_of(rows, np.arange(*span))
    low, high = operand_span
    tap_rows = (
        _take(x, (first + tap - low).clip(0, high - low - 1), dim)
        for tap in range(1 if weights is None else taps_of(rows))
    )
    if weights is None:
        return next(tap_rows).astype(dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    along = [1] * x.ndim
    along[dim] = len(first)
    total = jnp.zeros((), wide)
    for tap, rows_of_tap in enumerate(tap_rows):
        total = total + rows_of_tap.astype(wide) * weights[:, tap].astype(wide).reshape(along)
    return total.astype(dtype)


def _take(x: Any, numbers: np.ndarray, dim: int) -> Any:
    """Rows of an array by index; a slice if the indices are equally spaced."""
    steps = set(np.diff(numbers).tolist())
    if len(steps) <= 1 and min(steps, default=1) > 0:
        return lax.slice_in_dim(
            x,
            int(numbers[0]),
            int(numbers[-1]) + 1,
            min(steps, default=1),
            dim,
        )
    return jnp.take(x, numbers, axis=dim, mode="clip")


def _banded(x: Any, *weights: Any, **params: Any) -> Any:
    span = (0, params["size"])
    operand_span = (0, x.shape[params["dim"]])
    return band_rows(x, weights[0] if weights else None, span, operand_span, **params)


_primitive = compat.new_primitive("banded", _banded)


def banded(x: Any, weights: Any, dim: int, rows: Rows, size: int, dtype: Any) -> Any:
    """Weighted sums of rows of x along a dimension, accumulated in float32 or wider.

    Args:
      weights: (size, taps), as in `Band`; None if each row of the result is a copy of a row of x.
      rows: as in `Band`.
      size: rows of the result.
      dtype: the result's type.
    """
    operands = (x,) if weights is None else (x, weights)
    return _primitive.bind(*operands, dim=dim, rows=rows, size=size, dtype=np.dtype(dtype))


def _axes(eqn: Eqn) -> Axes:
    """Every dimension; along the banded one, a row reads its band's rows and its own weights."""
    dim = eqn.params["dim"]
    axes = with_rows(eqn, {(0, dim): eqn.params["rows"]})
    weights = [(dim, None) for _ in eqn.invars[1:]]
    return replace(axes, operands=(axes.operands[0], *weights))


def _rows(part: Part, operands: list[Any]) -> list[Any]:
    if part.axis != part.eqn.params["dim"]:
        return part.bind(operands)
    x, weights = (*operands, None)[:2]
    return [band_rows(x, weights, part.span, part.spans[0], **part.eqn.params)]


def _flops(eqn: Eqn) -> float:
    taps = shape_of(eqn.invars[1])[1] if len(eqn.invars) > 1 else 0
    return 2.0 * taps * math.prod(shape_of(eqn.outvars[0]))


register("banded", Primitive(flops=_flops, axes=_axes, run_rows=_rows))
