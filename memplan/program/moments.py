"""Squares about a mean: a sum that knows its mean only when it is complete, and how its parts are put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from memplan.program import compat


class Moments(NamedTuple):
    """Of the elements of an array that are summed over, in float32 or wider.

    Attributes:
      count: how many there are, the same for all means.
      squares: of their distances from their mean.
    """

    count: Any
    mean: Any
    squares: Any

    @classmethod
    def none(cls, shape: Sequence[int], dtype: Any) -> Moments:
        """Those of no elements."""
        wide = _wide(dtype)
        return cls(jnp.zeros((), wide), jnp.zeros(shape, wide), jnp.zeros(shape, wide))

    @classmethod
    def of(cls, x: Any, counts: Any, axes: Sequence[int]) -> Moments:
        """Those over some axes of the elements that count; see `squares_about_mean`."""
        x, counts = x.astype(_wide(x.dtype)), counts.astype(_wide(x.dtype))
        count = counts.sum() * (math.prod(x.shape[dim] for dim in axes) // counts.size)
        mean = (x * counts).sum(tuple(axes)) / jnp.maximum(count, 1)
        apart = x - jnp.expand_dims(mean, tuple(axes))
        return cls(count, mean, (jnp.square(apart) * counts).sum(tuple(axes)))

    def with_more(self, more: Moments) -> Moments:
        """Those of all, as Chan, Golub and LeVeque add them ("Updating formulae", 1979): no large squares cancel."""
        count = self.count + more.count
        apart, share = more.mean - self.mean, more.count / jnp.maximum(count, 1)
        squares = self.squares + more.squares + jnp.square(apart) * (self.count * share)
        return Moments(count, self.mean + apart * share, squares)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _squares(x: Any, counts: Any, *, axes: Sequence[int]) -> Any:
    return Moments.of(x, counts, axes).squares.astype(x.dtype)


_primitive = compat.new_primitive("squares_about_mean", _squares)


def squares_about_mean(x: Any, counts: Any, axes: Sequence[int]) -> Any:
    """sum((x - mean(x))^2) over some axes, in the type of x and computed in float32 at least.

    Args:
      counts: 1 for what counts and 0 for what does not; as many dimensions as x, of its size or 1, and 1 where x is
        not summed over.
    """
    return _primitive.bind(x, counts, axes=tuple(axes))
