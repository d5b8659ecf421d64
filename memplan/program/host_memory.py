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
    """A slice of a stack in host memory, on the device: by memcpy if `layer` is linear in a loop's trip."""
    return jax.device_put(jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False), DEVICE)


def write(buffers: Sequence[Any], results: Sequence[Any], layer: Any) -> list[Any]:
    """Stacks in host memory with one layer replaced."""
    return [
        jax.lax.dynamic_update_index_in_dim(stack, jax.device_put(result, HOST), layer, 0)
        for stack, result in zip(buffers, results, strict=True)
    ]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["dim", "rows_per_slab", "spare", "size"]
)
@dataclass(frozen=True)
class HostArray:
    """An array in host memory that loops write and read by rows.

    XLA copies rows if it sees that they are contiguous, at an offset linear in the loop's counter; otherwise a kernel
    reads or writes them (DynamicSliceAnnotator of XLA:GPU). So rows are the first dimension, and no index is clamped:
    there are spare rows, with arbitrary values, before the first and after the last.
    """

    array: Any  # its rows first, then the other dimensions of the array without `dim`
    dim: int
    rows_per_slab: int  # rows that a trip writes
    spare: int  # rows before the first
    size: int  # rows of the array

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: Any, dim: int, rows: int, trips: int, spare: tuple[int, int]
    ) -> HostArray:
        """An array that is not written yet.

        Args:
          shape: of the array.
          spare: rows before the first, and after those of the last slab.
        """
        others = [size for number, size in enumerate(shape) if number != dim]
        array = compat.empty((sum(spare) + trips * rows, *others), dtype, HOST)
        return cls(array, dim, rows, spare[0], shape[dim])

    @functools.cached_property
    def whole(self) -> Any:
        """The array, on the device."""
        return self._read(self.spare, self.size)

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array on the device, relative to the first row of a trip's slab; arbitrary values outside of the
        array.
        """
        return self._read(trip * self.rows_per_slab + (self.spare + span[0]), span[1] - span[0])

    def written(self, trip: Any, slab: Any) -> HostArray:
        """The array with the rows of a trip written."""
        slab = jax.device_put(jnp.moveaxis(slab, self.dim, 0), HOST)
        first = trip * self.rows_per_slab + self.spare
        array = lax.dynamic_update_slice_in_dim(self.array, slab, first, 0, allow_negative_indices=False)
        return replace(self, array=array)

    def _read(self, first: Any, rows: int) -> Any:
        found = lax.dynamic_slice_in_dim(self.array, first, rows, 0, allow_negative_indices=False)
        return jnp.moveaxis(jax.device_put(found, DEVICE), 0, self.dim)
