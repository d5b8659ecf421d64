"""Arrays in host memory: how loops read and write slices of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memplan.planning.graph import Span
from memplan.program import compat

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def fetch(stack: Any, layer: Any) -> Any:
    """Copy one layer of a stack in host memory to the device.

    XLA uses memcpy if `layer` is linear in the loop's counter.
    """
    return jax.device_put(lax.dynamic_index_in_dim(stack, layer, keepdims=False), DEVICE)


def write(stacks: Sequence[Any], results: Sequence[Any], layer: Any) -> list[Any]:
    """The stacks in host memory, each with one layer replaced by a result."""
    return [
        lax.dynamic_update_index_in_dim(stack, jax.device_put(result, HOST), layer, 0)
        for stack, result in zip(stacks, results, strict=True)
    ]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["dim", "rows_per_slab", "spare", "size"],
)
@dataclass(frozen=True)
class HostArray:
    """An array in host memory that loops write and read by rows.

    XLA copies rows by memcpy if they are contiguous and their offset is linear in the loop's
    counter; otherwise a kernel reads or writes them (DynamicSliceAnnotator of XLA:GPU). So rows are
    the first dimension, and no index is clamped: padding rows, with arbitrary values, come before
    the first row and after the last.
    """

    array: Any  # rows first, then the other dimensions
    dim: int  # the dimension of the rows in the array as the program knows it
    rows_per_slab: int  # rows that a trip writes
    spare: int  # padding rows before the first
    size: int  # rows of the array, without padding

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        dtype: Any,
        dim: int,
        rows: int,
        trips: int,
        spare: tuple[int, int],
    ) -> HostArray:
        """An uninitialized array.

        Args:
          shape: the array's, without padding.
          rows: rows that a trip writes.
          spare: padding rows before the first row, and after the rows of the last trip.
        """
        sizes = [size for axis, size in enumerate(shape) if axis != dim]
        array = compat.empty((sum(spare) + trips * rows, *sizes), dtype, HOST)
        return cls(array, dim, rows, spare[0], shape[dim])

    @functools.cached_property
    def whole(self) -> Any:
        """The array, on the device."""
        return self._read(self.spare, self.size)

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows on the device, counted from the first row of a trip's slab.

        Rows that the array does not have contain arbitrary values.
        """
        return self._read(trip * self.rows_per_slab + (self.spare + span[0]), span[1] - span[0])

    def written(self, trip: Any, slab: Any) -> HostArray:
        """The array after a trip wrote its rows."""
        slab = jax.device_put(jnp.moveaxis(slab, self.dim, 0), HOST)
        first = trip * self.rows_per_slab + self.spare
        array = lax.dynamic_update_slice_in_dim(
            self.array,
            slab,
            first,
            0,
            allow_negative_indices=False,
        )
        return replace(self, array=array)

    def _read(self, first: Any, rows: int) -> Any:
        window = lax.dynamic_slice_in_dim(self.array, first, rows, 0, allow_negative_indices=False)
        return jnp.moveaxis(jax.device_put(window, DEVICE), 0, self.dim)
