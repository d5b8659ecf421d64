"""Products with banded matrices, as images are resized by: every row of the result reads few rows, near its own."""

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

MOST_TAPS = 64  # rows that one reads: each is another term to add up


@dataclass(frozen=True)
class Band:
    """The nonzero band of a matrix (result rows x operand rows)."""

    rows: Rows  # the operand rows that each row of the result reads
    weights: np.ndarray  # (result rows, taps), of operand rows from `first_of` on; zero where there is none

    @classmethod
    def of(cls, shape: Sequence[int], made: np.ndarray, given: np.ndarray, values: np.ndarray) -> Band | None:
        """The band of a matrix with this shape and these elements; None if it is wide, or no narrower than the matrix.

        Args:
          made, given, values: where the elements are that are not zero, and what.
        """
        if not len(values):
            return None
        common = math.gcd(*shape)
        stride, dilation = shape[1] // common, shape[0] // common
        apart = made * stride - given * dilation
        rows = Rows(stride, dilation, int(apart.max()), int(apart.max() - apart.min()) + 1)
        if not taps_of(rows) <= min(MOST_TAPS, shape[1] - 1):
            return None
        weights = np.zeros((shape[0], taps_of(rows)), values.dtype)
        weights[made, given - first_of(rows, made)] = values
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
    x: Any, weights: Any, span: Span, given: Span, *, dim: int, rows: Rows, dtype: Any, size: int | None = None
) -> Any:
    """Rows of the result of `banded`.

    Args:
      x, weights: the rows `given` of x, and the rows `span` of the weights or None.
    """
    first, (low, high) = first_of(rows, np.arange(*span)), given
    taken = (
        _taken(x, (first + tap - low).clip(0, high - low - 1), dim)
        for tap in range(1 if weights is None else taps_of(rows))
    )
    if weights is None:
        return next(taken).astype(dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    along = [1] * x.ndim
    along[dim] = len(first)
    total = jnp.zeros((), wide)
    for tap, one in enumerate(taken):
        total = total + one.astype(wide) * weights[:, tap].astype(wide).reshape(along)
    return total.astype(dtype)


def _taken(x: Any, numbers: np.ndarray, dim: int) -> Any:
    """Rows of an array by index; a slice if the indices are equally spaced."""
    steps = set(np.diff(numbers).tolist())
    if len(steps) <= 1 and min(steps, default=1) > 0:
        return lax.slice_in_dim(x, int(numbers[0]), int(numbers[-1]) + 1, min(steps, default=1), dim)
    return jnp.take(x, numbers, axis=dim, mode="clip")


def _banded(x: Any, *weights: Any, **params: Any) -> Any:
    return band_rows(x, weights[0] if weights else None, (0, params["size"]), (0, x.shape[params["dim"]]), **params)


_primitive = compat.new_primitive("banded", _banded)


def banded(x: Any, weights: Any, dim: int, rows: Rows, size: int, dtype: Any) -> Any:
    """Along a dimension, weighted sums of rows of x (a `Band`'s), accumulated in float32 or wider.

    Args:
      weights: (size, taps), or None: each row is one of x.
      size: rows of the result.
      dtype: of the result.
    """
    operands = (x,) if weights is None else (x, weights)
    return _primitive.bind(*operands, dim=dim, rows=rows, size=size, dtype=np.dtype(dtype))


def _axes(eqn: Eqn) -> Axes:
    """Every dimension; along the banded one, rows read the rows of their band, and the weights go with the result."""
    dim = eqn.params["dim"]
    found = with_rows(eqn, {(0, dim): eqn.params["rows"]})
    weights = [(dim, None) for _ in eqn.invars[1:]]
    return replace(found, operands=(found.operands[0], *weights))


def _rows(part: Part, operands: list[Any]) -> list[Any]:
    if part.axis != part.eqn.params["dim"]:
        return part.bind(operands)
    x, weights = (*operands, None)[:2]
    return [band_rows(x, weights, part.span, part.spans[0], **part.eqn.params)]


def _flops(eqn: Eqn) -> float:
    taps = shape_of(eqn.invars[1])[1] if len(eqn.invars) > 1 else 0
    return 2.0 * taps * math.prod(shape_of(eqn.outvars[0]))


register("banded", Primitive(flops=_flops, axes=_axes, run_rows=_rows))
