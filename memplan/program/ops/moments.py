"""Sums of squares about a mean, accumulated over parts together with the mean."""

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
    # the mean is mean_hi + mean_lo: one number is too coarse for a mean far from zero
    mean_hi: Any
    mean_lo: Any
    squares: Any  # sum of squared distances from the mean

    @classmethod
    def none(cls, shape: Sequence[int], dtype: Any) -> Moments:
        """The identity: moments of no elements."""
        wide = _wide(dtype)
        return cls(jnp.zeros((), wide), *(jnp.zeros(shape, wide) for _ in range(3)))

    @classmethod
    def of(cls, x: Any, counts: Any, axes: Sequence[int]) -> Moments:
        """Moments of the elements that count, over some axes; see `squares_about_mean`."""
        wide = _wide(x.dtype)
        x = x.astype(wide)
        counts = counts.astype(wide)
        count = counts.sum() * float(math.prod(x.shape[dim] for dim in axes) // counts.size)
        mean_hi = _rounded((x * counts).sum(tuple(axes)) / jnp.maximum(count, 1))
        centred = x - jnp.expand_dims(mean_hi, tuple(axes))
        mean_lo = (centred * counts).sum(tuple(axes)) / jnp.maximum(count, 1)
        squares = (jnp.square(centred) * counts).sum(tuple(axes)) - jnp.square(mean_lo) * count
        return cls(count, mean_hi, mean_lo, squares)

    def accumulate(self, part: Moments) -> Moments:
        """Moments of both sets, by Chan, Golub and LeVeque ("Updating formulae", 1979).

        No large squares cancel. Means are compared relative to the first one, so that their
        difference is exact.
        """
        count = self.count + part.count
        mean_hi = jnp.where(self.count > 0, self.mean_hi, part.mean_hi)
        distance = part.mean_hi - mean_hi + part.mean_lo - self.mean_lo
        share = part.count / jnp.maximum(count, 1)
        squares = self.squares + part.squares + jnp.square(distance) * (self.count * share)
        return Moments(count, mean_hi, self.mean_lo + distance * share, squares)


def _rounded(mean: Any) -> Any:
    """The number with one bit less than its type, so that all its readers get the same value.

    A fused reader may compute a mean again without rounding it. With a mean of 1e4 deviations,
    variances in slabs were wrong by 2e-4, other variances by 1e-5.
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
      counts: 1 for elements that count, else 0. It has as many dimensions as x, each of x's size or
        of size 1; dimensions that are not reduced have size 1.
    """
    return _primitive.bind(x, counts, axes=tuple(axes))


def _axes(eqn: Eqn) -> Axes:
    """Like a sum, but parts are combined with their counts, which must be on the axis, too."""
    axes = eqn.params["axes"]
    shape, counts = map(shape_of, eqn.invars)
    kept = tuple(dim for dim in range(len(shape)) if dim not in axes)
    dims = range(len(shape))
    counted = tuple(dim if counts[dim] == shape[dim] and dim in axes else None for dim in dims)
    operand = tuple(counted[dim] if dim in axes else dim for dim in range(len(shape)))
    reduced: dict[int, Reduction] = {dim: "moments" for dim in counted if dim is not None}
    return Axes((operand, counted), (kept,), reduced)


def _rows(part: Part, operands: list[Any]) -> list[Any]:
    """The contribution of these rows if the axis is reduced, with their count and mean."""
    if part.axis not in part.axes.reduced:
        return part.bind(operands)
    return [Moments.of(operands[0], operands[1], part.eqn.params["axes"])]


register("squares_about_mean", Primitive("reduction", flops=4, axes=_axes, run_rows=_rows))
