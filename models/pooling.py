"""Pooling to a fixed number of bins, so that a dense layer behind it fits images of every size."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def adaptive_average(x: jax.Array, bins: Sequence[int]) -> jax.Array:
    """Average (batch, *spatial, channels) over `bins` per spatial axis -> (batch, *bins, channels),
    same dtype.

    Bin `i` of `k` over `n` cells holds the cells from floor(i n / k) up to ceil((i + 1) n / k), as
    in PyTorch: bins overlap where `k` does not divide `n`. By a product with a matrix per axis:
      slices would have pads as gradients.
    """
    for axis, count in enumerate(bins, start=1):
        if x.shape[axis] != count:
            shares = _shares(x.shape[axis], count, x.dtype)
            averages = jnp.tensordot(x, shares, (axis, 0), precision=jax.lax.Precision.HIGHEST)
            x = jnp.moveaxis(averages, -1, axis)
    return x


def _shares(cells: int, bins: int, dtype: jnp.dtype) -> jax.Array:
    """What each cell gives to each bin: (cells, bins), columns sum to one."""
    cell, bin_ = jnp.arange(cells)[:, None], jnp.arange(bins)
    inside = (cell >= bin_ * cells // bins) & (cell < -(-(bin_ + 1) * cells // bins))
    return (inside / inside.sum(0)).astype(dtype)
