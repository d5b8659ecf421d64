"""Arrays that loops over slabs read by rows: as somebody gave them, or as an earlier loop wrote them."""

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
from memplan.program.transforms.layerwise_scan import DEVICE, HOST


@dataclass(frozen=True)
class Stack:
    """An array on the device as a loop wrote it: slab upon slab."""

    slabs: Any  # trips first, then the dimensions of the array, of which `dim` has a slab's rows
    dim: int
    size: int  # rows of the array

    @functools.cached_property
    def whole(self) -> Any:
        shape = list(self.slabs.shape[1:])
        shape[self.dim] *= self.slabs.shape[0]
        return lax.slice_in_dim(jnp.moveaxis(self.slabs, 0, self.dim).reshape(shape), 0, self.size, axis=self.dim)

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array, counted from the first of a trip's slab; anything where it has none."""
        rows, trips = self.slabs.shape[self.dim + 1], self.slabs.shape[0]
        pieces = []
        for slab in range(span[0] // rows, -(-span[1] // rows)):
            low, high = max(span[0] - slab * rows, 0), min(span[1] - slab * rows, rows)
            starts = [jnp.zeros((), jnp.int32)] * self.slabs.ndim
            starts[0] = jnp.clip(trip + slab, 0, trips - 1)
            starts[self.dim + 1] = jnp.full((), low, jnp.int32)
            sizes = [1, *self.slabs.shape[1:]]
            sizes[self.dim + 1] = high - low
            pieces.append(lax.squeeze(lax.dynamic_slice(self.slabs, starts, sizes), (0,)))
        return joined(pieces, self.dim)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["dim", "rows_per_slab", "spare", "size"]
)
@dataclass(frozen=True)
class HostArray:
    """An array in host memory that loops write and read by rows.

    XLA copies rows where it sees that they lie together, at an offset that is linear in the loop's counter; else a
    kernel reads or writes them (DynamicSliceAnnotator of XLA:GPU). So rows come first, and no index is clamped: there
    are spare rows before the first and behind the last, of anything.
    """

    array: Any  # its rows first, then the other dimensions of the array, of which `dim` is missing
    dim: int
    rows_per_slab: int  # of so many rows a trip writes
    spare: int  # rows before the first
    size: int  # rows of the array

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: Any, dim: int, rows: int, trips: int, spare: tuple[int, int]
    ) -> HostArray:
        """Nothing was written to it yet.

        Args:
          shape: of the array.
          spare: rows before the first, and behind those of the last slab.
        """
        others = [size for number, size in enumerate(shape) if number != dim]
        array = compat.empty_on_host((sum(spare) + trips * rows, *others), dtype)
        return cls(array, dim, rows, spare[0], shape[dim])

    @functools.cached_property
    def whole(self) -> Any:
        """The array, on the device."""
        return self._read(self.spare, self.size)

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array on the device, counted from the first of a trip's slab; anything where it has none."""
        return self._read(trip * self.rows_per_slab + (self.spare + span[0]), span[1] - span[0])

    def written(self, trip: Any, slab: Any) -> HostArray:
        """With the rows of a trip."""
        slab = jax.device_put(jnp.moveaxis(slab, self.dim, 0), HOST)
        first = trip * self.rows_per_slab + self.spare
        array = lax.dynamic_update_slice_in_dim(self.array, slab, first, 0, allow_negative_indices=False)
        return replace(self, array=array)

    def _read(self, first: Any, rows: int) -> Any:
        found = lax.dynamic_slice_in_dim(self.array, first, rows, 0, allow_negative_indices=False)
        return jnp.moveaxis(jax.device_put(found, DEVICE), 0, self.dim)


@dataclass(frozen=True)
class Array:
    """An array on the device that is read by slabs."""

    array: Any
    dim: int
    rows_per_slab: int  # of so many slabs it consists

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array, counted from the first of a trip's slab; anything where it has none.

        Slab by slab, so that each piece is whole in the array or not in it at all.
        """
        rows, size = self.rows_per_slab, self.array.shape[self.dim]
        pieces = []
        for slab in range(span[0] // rows, -(-span[1] // rows)):
            low, high = max(span[0], slab * rows), min(span[1], (slab + 1) * rows)
            start = jnp.clip(trip * rows + low, 0, size - (high - low))
            pieces.append(lax.dynamic_slice_in_dim(self.array, start, high - low, self.dim))
        return joined(pieces, self.dim)


def joined(pieces: Sequence[Any], dim: int) -> Any:
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)


def whole(value: Any) -> Any:
    return value.whole if isinstance(value, Stack | HostArray) else value
