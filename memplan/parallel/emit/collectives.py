"""Collectives over the axes of a mesh, in the phases that the links make cheapest. To be called inside `shard_map`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from memplan.hardware.collectives import Decomposition, Phase, cheapest
from memplan.hardware.topology import Topology
from memplan.parallel.emit.compression import Compressor, padded
from memplan.parallel.partition.placement import Placement, Shard

Array = Any


@dataclass(frozen=True)
class Sum:
    """One bucket that was reduced: what was chosen for it."""

    nbytes: int  # of its terms on one device
    terms: int  # how many arrays are in it
    how: str  # phases of the all-reduce; of a reduce-scatter, the axes on the way down


@dataclass
class Collectives:
    """Emits collectives, and keeps which it chose."""

    topology: Topology
    # an all-reduce goes in the cheapest phases; False: in one, over all axes, and what becomes of it is the engine's
    # affair
    decomposes: bool = True
    compressor: Compressor | None = None  # of messages, if any
    trusts_reduce_scatter: bool = True  # of the engine; see `trusts_reduce_scatter`
    sums: list[Sum] = field(default_factory=list)
    _sent: Array | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.topology.sizes)

    @property
    def devices(self) -> int:
        return self.topology.devices

    @property
    def rank(self) -> Array:
        """Number of this device, outermost axis first."""
        return jax.lax.axis_index(self.names)

    def reduce(
        self, terms: Sequence[Array], placements: Sequence[Placement], lossy: bool, in_turn: bool = False
    ) -> list[Callable[[], Array]]:
        """Every device's terms, summed, in the placements asked for: one collective for each element type and kind.

        Each is taken out of what travelled together when it is asked for: until then, nothing waits for it.

        Args:
          lossy: these may be compressed, where that is wanted at all.
        """
        results: dict[int, Callable[[], Array]] = {}
        for members in _alike(terms, placements):
            of_kind = [terms[i] for i in members]
            dims = [one.dim for i in members if isinstance(one := placements[i], Shard)]
            summed = self._reduce_to_shards(of_kind, dims) if dims else self._reduce_everywhere(of_kind, lossy, in_turn)
            results.update(zip(members, summed, strict=True))
        return [results[i] for i in range(len(terms))]

    def _reduce_everywhere(self, terms: Sequence[Array], lossy: bool, in_turn: bool) -> list[Callable[[], Array]]:
        flat = _concatenate([term.reshape(-1) for term in terms])
        compressor = self.compressor if lossy and self.compressor and self.compressor.pays_for(flat) else None
        how = self.decomposition(flat.nbytes / 2 if compressor else flat.nbytes)
        flat = self._in_turn(flat) if in_turn else flat
        spelled = f"{how}, the last in {compressor.dtype}" if compressor else str(how)
        self.sums.append(Sum(flat.nbytes, len(terms), spelled))
        result = self._all_reduce(flat, how.phases, compressor)
        self._sent = result if in_turn else self._sent
        return _pieces(result, [term.shape for term in terms])

    def _in_turn(self, flat: Array) -> Array:
        """Buckets share the links: one goes when the last has come."""
        if self._sent is None:
            return flat
        flat, _ = jax.lax.optimization_barrier((flat, self._sent))
        return flat

    def decomposition(self, nbytes: float) -> Decomposition:
        if self.decomposes:
            return cheapest(self.topology, nbytes)
        axes = tuple(axis.name for axis in self.topology.axes if axis.size > 1)
        return Decomposition((Phase(axes, False),) if axes else ())

    def _all_reduce(self, flat: Array, phases: Sequence[Phase], compressor: Compressor | None) -> Array:
        if not phases:
            return flat
        first, rest = phases[0], phases[1:]
        sizes = [self.topology.axis(name).size for name in first.axes]
        if not rest:
            return compressor.all_reduce(flat, first.axes, sizes) if compressor else jax.lax.psum(flat, first.axes)
        if not first.scatters:
            apart = jax.lax.optimization_barrier(jax.lax.psum(flat, first.axes))  # else XLA makes both phases one
            return self._all_reduce(apart, rest, compressor)
        size = math.prod(sizes)
        table = padded(flat, size).reshape(size, -1)
        part = self._all_reduce(self._reduce_scatter(table, first.axes, 0), rest, compressor)
        return jax.lax.all_gather(part, first.axes, tiled=True)[: flat.size]

    def _reduce_scatter(self, table: Array, axes: Sequence[str], dim: int) -> Array:
        """Summed over the devices of the axes; each keeps its own index of a dimension."""
        if self.trusts_reduce_scatter:
            return jax.lax.psum_scatter(table, axes, scatter_dimension=dim, tiled=False)
        return jax.lax.all_to_all(table, axes, dim, dim, tiled=False).sum(dim, dtype=table.dtype)

    def _reduce_to_shards(self, terms: Sequence[Array], dims: Sequence[int]) -> list[Callable[[], Array]]:
        """Row `r` of what is scattered holds what device `r` keeps, moved to the front dimension."""
        fronts = [jnp.moveaxis(term, dim, 0) for term, dim in zip(terms, dims, strict=True)]
        rows = [front.reshape(self.devices, -1) for front in fronts]
        table = jnp.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]
        order = self._inner_first()
        how = " ".join(f"reduce-scatter({name})" for name in order)
        self.sums.append(Sum(table.nbytes, len(terms), how))
        kept = self._reduce_scatter_rows(table, order)
        shapes = [(front.shape[0] // self.devices, *front.shape[1:]) for front in fronts]
        parts = _pieces(kept, shapes)
        return [lambda part=part, dim=dim: jnp.moveaxis(part(), 0, dim) for part, dim in zip(parts, dims, strict=True)]

    def all_gather(self, parts: Sequence[Array], dims: Sequence[int]) -> list[Array]:
        """Split arrays, whole on every device: one collective for each element type."""
        results: dict[int, Array] = {}
        for members in _alike(parts, list(map(Shard, dims))):
            fronts = [jnp.moveaxis(parts[i], dims[i], 0) for i in members]
            table = self._all_gather_rows(
                _concatenate([front.reshape(-1) for front in fronts]), self._inner_first()[::-1]
            )
            start = 0
            for i, front in zip(members, fronts, strict=True):
                rows = table[:, start : start + front.size]
                start += front.size
                whole = rows.reshape(self.devices * front.shape[0], *front.shape[1:])
                results[i] = jnp.moveaxis(whole, 0, dims[i])
        return [results[i] for i in range(len(parts))]

    def extremum(self, value: Array, how: str) -> Array:
        """The maximum or minimum over all devices; not a number where it is none on any, which no engine promises."""
        reduce = jax.lax.pmax if how == "max" else jax.lax.pmin
        if value.dtype == bool:
            return reduce(value.astype(jnp.int8), self.names).astype(bool)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return reduce(value, self.names)
        value, ordered = (-value, -1) if how == "min" else (value, 1)
        return ordered * _floats(jax.lax.pmax(_ordered(value), self.names), value.dtype)

    def shard(self, whole: Array, dim: int) -> Array:
        size = whole.shape[dim] // self.devices
        return jax.lax.dynamic_slice_in_dim(whole, self.rank * size, size, dim)

    def on_first(self, whole: Array) -> Array:
        """A term that only the first device has."""
        return jnp.where(self.rank == 0, whole, jnp.zeros_like(whole))

    def _inner_first(self) -> list[str]:
        """Axes in the order of a reduce-scatter: from the inside, where there is most to send and links are fast."""
        return [axis.name for axis in reversed(self.topology.axes) if axis.size > 1]

    def _reduce_scatter_rows(self, table: Array, order: Sequence[str]) -> Array:
        """Rows by device, summed over all devices; the own row is kept."""
        sizes = [axis.size for axis in self.topology.axes]
        cube = table.reshape(*sizes, -1)
        left = list(self.names)
        for name in order:
            at = left.index(name)
            cube = self._reduce_scatter(cube, (name,), at)
            left.pop(at)
        return cube.reshape(-1)

    def _all_gather_rows(self, row: Array, order: Sequence[str]) -> Array:
        """Every device's row, in the order of devices."""
        cube, there = row, []
        for name in order:
            at = sum(self.names.index(other) < self.names.index(name) for other in there)
            cube = jax.lax.all_gather(cube, name, axis=at, tiled=False)
            there.append(name)
        return cube.reshape(self.devices, -1)


def _ordered(value: Array) -> Array:
    """Whole numbers in the order of these floats, above all of them what is not a number."""
    wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(wide), jnp.nan, wide), f"int{8 * wide.dtype.itemsize}")
    return jnp.where(bits < 0, ~bits | jnp.iinfo(bits.dtype).min, bits)


def _floats(ordered: Array, dtype: Any) -> Array:
    """What `_ordered` was made of."""
    bits = jnp.where(ordered < 0, ~(ordered & jnp.iinfo(ordered.dtype).max), ordered)
    return jax.lax.bitcast_convert_type(bits, f"float{8 * ordered.dtype.itemsize}").astype(dtype)


def trusts_reduce_scatter(mesh: Mesh | AbstractMesh) -> bool:
    """False on CPU, where gloo's reduce-scatter reads what others overwrite and gives wrong sums now and then.

    Reported with its cause as https://github.com/jax-ml/jax/issues/40830. There the parts are exchanged, and every
    device adds up its own: as many bytes, and in one order.
    """
    return isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu"


def _alike(arrays: Sequence[Array], placements: Sequence[Placement]) -> Iterator[list[int]]:
    kinds: dict[Any, list[int]] = {}
    for i, (array, placement) in enumerate(zip(arrays, placements, strict=True)):
        kinds.setdefault((array.dtype, isinstance(placement, Shard)), []).append(i)
    yield from kinds.values()


def _concatenate(flat: Sequence[Array]) -> Array:
    return jnp.concatenate(flat) if len(flat) > 1 else flat[0]


def _pieces(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Callable[[], Array]]:
    parts, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(functools.partial(_piece, flat, start, end, shape))
        start = end
    return parts


def _piece(flat: Array, start: int, end: int, shape: tuple[int, ...]) -> Array:
    return jax.lax.slice(flat, (start,), (end,)).reshape(shape)
