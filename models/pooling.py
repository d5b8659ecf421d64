"""Pooling to a fixed number of bins, so that a dense layer can follow for images of any size."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def adaptive_average(x: jax.Array, bins: Sequence[int]) -> jax.Array:
    """Average (batch, *spatial, channels) in bins -> (batch, *bins, channels), same dtype.

    Bin `i` of `k` over `n` cells has the cells from floor(i n / k) to ceil((i + 1) n / k), as in
    PyTorch, so bins overlap if `k` does not divide `n`. Each axis is multiplied by a matrix,
    because the gradients of slices would be pads.
    """
    for axis, count in enumerate(bins, start=1):
        if x.shape[axis] != count:
            shares = _shares(x.shape[axis], count, x.dtype)
            averages = jnp.tensordot(x, shares, (axis, 0), precision=jax.lax.Precision.HIGHEST)
            x = jnp.moveaxis(averages, -1, axis)
    return x


def _shares(cells: int, bins: int, dtype: jnp.dtype) -> jax.Array:
    """The weight of each cell in each bin: (cells, bins), whose columns sum to one."""
    cell, bin_ = jnp.arange(cells)[:, None], jnp.arange(bins)
    inside = (cell >= bin_ * cells // bins) & (cell < -(-(bin_ + 1) * cells // bins))
    return (inside / inside.sum(0)).astype(dtype)
