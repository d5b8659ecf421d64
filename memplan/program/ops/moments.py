"""Sums of squares about a mean that is known only at the end, and their accumulation over parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from memplan.program import compat
from memplan.program.ops.axes import Axes, Reduction, shape_of
from memplan.program.ops.record import Eqn, Part, Primitive, register


class Moments(NamedTuple):
    """Count, mean and squares about the mean of the reduced elements, in float32 or wider."""

    count: Any  # number of elements, the same for all means
    mean_hi: Any  # the mean is mean_hi + mean_lo: one number is too coarse for a mean far from zero
    mean_lo: Any
    squares: Any  # sum of squared distances from the mean

    @classmethod
    def none(cls, shape: Sequence[int], dtype: Any) -> Moments:
        """The identity: moments of no elements."""
        wide = _wide(dtype)
        return cls(jnp.zeros((), wide), *(jnp.zeros(shape, wide) for _ in range(3)))

    @classmethod
    def of(cls, x: Any, counts: Any, axes: Sequence[int]) -> Moments:
        """Moments over some axes, of the elements that count; see `squares_about_mean`."""
        x, counts = x.astype(_wide(x.dtype)), counts.astype(_wide(x.dtype))
        count = counts.sum() * float(math.prod(x.shape[dim] for dim in axes) // counts.size)
        mean_hi = _rounded((x * counts).sum(tuple(axes)) / jnp.maximum(count, 1))
        apart = x - jnp.expand_dims(mean_hi, tuple(axes))
        mean_lo = (apart * counts).sum(tuple(axes)) / jnp.maximum(count, 1)
        return cls(count, mean_hi, mean_lo, (jnp.square(apart) * counts).sum(tuple(axes)) - jnp.square(mean_lo) * count)

    def accumulate(self, more: Moments) -> Moments:
        """Moments of both sets, by Chan, Golub and LeVeque ("Updating formulae", 1979): no large squares cancel.

        Means are compared relative to the first one, so that their difference is exact.
        """
        count = self.count + more.count
        mean_hi = jnp.where(self.count > 0, self.mean_hi, more.mean_hi)
        apart, share = more.mean_hi - mean_hi + more.mean_lo - self.mean_lo, more.count / jnp.maximum(count, 1)
        squares = self.squares + more.squares + jnp.square(apart) * (self.count * share)
        return Moments(count, mean_hi, self.mean_lo + apart * share, squares)


def _rounded(mean: Any) -> Any:
    """The number with one bit less than its type: the same value wherever it is read.

    In compiled code, a mean that is divided where it is subtracted may not be rounded there; with a mean of 1e4
    deviations, variances in slabs were wrong by 2e-4, those without by 1e-5.
    """
    bits = jnp.finfo(mean.dtype)
    return lax.reduce_precision(mean, bits.nexp, bits.nmant - 1)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _squares(x: Any, counts: Any, *, axes: Sequence[int]) -> Any:
    return Moments.of(x, counts, axes).squares.astype(x.dtype)


_primitive = compat.new_primitive("squares_about_mean", _squares)


def squares_about_mean(x: Any, counts: Any, axes: Sequence[int]) -> Any:
    """sum((x - mean(x))^2) over some axes, in the type of x, computed in float32 or wider.

    Args:
      counts: 1 for elements that count, else 0; as many dimensions as x, of its size or 1, and 1 along dimensions
        that are not reduced.
    """
    return _primitive.bind(x, counts, axes=tuple(axes))


def _axes(eqn: Eqn) -> Axes:
    """Reduced like a sum, but parts are combined with their counts and means: the counts must be on the axis, too."""
    axes = eqn.params["axes"]
    shape, counts = map(shape_of, eqn.invars)
    kept = tuple(dim for dim in range(len(shape)) if dim not in axes)
    counted = tuple(dim if counts[dim] == shape[dim] and dim in axes else None for dim in range(len(shape)))
    operand = tuple(counted[dim] if dim in axes else dim for dim in range(len(shape)))
    reduced: dict[int, Reduction] = {dim: "moments" for dim in counted if dim is not None}
    return Axes((operand, counted), (kept,), reduced)


def _rows(part: Part, operands: list[Any]) -> list[Any]:
    """The contribution of these rows if the axis is reduced, with their count and mean."""
    if part.axis not in part.axes.reduced:
        return part.bind(operands)
    return [Moments.of(operands[0], operands[1], part.eqn.params["axes"])]


register("squares_about_mean", Primitive("reduction", flops=4, axes=_axes, run_rows=_rows))
