"""Collectives over the axes of a mesh, in the phases that cost least on its links. To be called inside `shard_map`."""

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
from memplan.parallel.partition.sharded import Placement, Shard

Array = Any


@dataclass(frozen=True)
class Sum:
    """One bucket that was reduced."""

    nbytes: int  # of its terms on one device
    terms: int  # how many arrays are in it
    how: str  # phases of the all-reduce; of a reduce-scatter, the axes on the way down


@dataclass
class Collectives:
    """Emits collectives, and records its sums."""

    topology: Topology
    decomposes: bool = True  # all-reduce in the cheapest phases; False: in one phase over all axes
    compressor: Compressor | None = None
    trusts_reduce_scatter: bool = True  # see the function of this name
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
        """Sum every device's terms, with one collective for each element type and kind of placement.

        Each result is sliced out of its bucket when it is called for, so nothing waits for it earlier.

        Args:
          lossy: these may be compressed, if there is a compressor.
          in_turn: start after the last sum that was in turn.
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
        if in_turn and self._sent is not None:  # buckets share the links: each waits for the last
            flat, _ = jax.lax.optimization_barrier((flat, self._sent))
        spelled = f"{how}, the last in {compressor.dtype}" if compressor else str(how)
        self.sums.append(Sum(flat.nbytes, len(terms), spelled))
        result = self._all_reduce(flat, how.phases, compressor)
        self._sent = result if in_turn else self._sent
        return _pieces(result, [term.shape for term in terms])

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
        """Sum over the devices of the axes; each keeps its own index of a dimension."""
        if self.trusts_reduce_scatter:
            return jax.lax.psum_scatter(table, axes, scatter_dimension=dim, tiled=False)
        return jax.lax.all_to_all(table, axes, dim, dim, tiled=False).sum(dim, dtype=table.dtype)

    def _reduce_to_shards(self, terms: Sequence[Array], dims: Sequence[int]) -> list[Callable[[], Array]]:
        """Row `r` of the table that is scattered holds what device `r` keeps, its split dimension in front."""
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
        """Gather split arrays on every device, with one collective for each element type."""
        results: dict[int, Array] = {}
        for members in _alike(parts, list(map(Shard, dims))):
            fronts = [jnp.moveaxis(parts[i], dims[i], 0) for i in members]
            cube, there = _concatenate([front.reshape(-1) for front in fronts]), []
            for name in reversed(self._inner_first()):
                at = sum(self.names.index(other) < self.names.index(name) for other in there)
                cube = jax.lax.all_gather(cube, name, axis=at, tiled=False)
                there.append(name)
            table, start = cube.reshape(self.devices, -1), 0  # a row for each device
            for i, front in zip(members, fronts, strict=True):
                rows = table[:, start : start + front.size]
                start += front.size
                whole = rows.reshape(self.devices * front.shape[0], *front.shape[1:])
                results[i] = jnp.moveaxis(whole, 0, dims[i])
        return [results[i] for i in range(len(parts))]

    def extremum(self, value: Array, how: str) -> Array:
        """The maximum or minimum over all devices; NaN where it is NaN on any."""
        reduce = jax.lax.pmax if how == "max" else jax.lax.pmin
        if value.dtype == bool:
            return reduce(value.astype(jnp.int8), self.names).astype(bool)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return reduce(value, self.names)
        value, ordered = (-value, -1) if how == "min" else (value, 1)
        # As whole numbers in the order of the floats, NaN above all of them: no engine promises to pass on NaN.
        wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
        kind = f"{8 * wide.dtype.itemsize}"
        bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(wide), jnp.nan, wide), f"int{kind}")
        whole = jax.lax.pmax(jnp.where(bits < 0, ~bits | jnp.iinfo(bits.dtype).min, bits), self.names)
        bits = jnp.where(whole < 0, ~(whole & jnp.iinfo(whole.dtype).max), whole)
        return ordered * jax.lax.bitcast_convert_type(bits, f"float{kind}").astype(value.dtype)

    def shard(self, whole: Array, dim: int) -> Array:
        size = whole.shape[dim] // self.devices
        return jax.lax.dynamic_slice_in_dim(whole, self.rank * size, size, dim)

    def on_first(self, whole: Array) -> Array:
        """A term that only the first device has."""
        return jnp.where(self.rank == 0, whole, jnp.zeros_like(whole))

    def _inner_first(self) -> list[str]:
        """Axes in the order of a reduce-scatter: inner ones first, where most is sent and links are fast."""
        return [axis.name for axis in reversed(self.topology.axes) if axis.size > 1]

    def _reduce_scatter_rows(self, table: Array, order: Sequence[str]) -> Array:
        """Sum the table over all devices; each keeps its row."""
        sizes = [axis.size for axis in self.topology.axes]
        cube = table.reshape(*sizes, -1)
        left = list(self.names)
        for name in order:
            at = left.index(name)
            cube = self._reduce_scatter(cube, (name,), at)
            left.pop(at)
        return cube.reshape(-1)


def trusts_reduce_scatter(mesh: Mesh | AbstractMesh) -> bool:
    """False on CPU: gloo's reduce-scatter reads memory that others overwrite, so its sums are sometimes wrong.

    Reported with its cause as https://github.com/jax-ml/jax/issues/40830. Instead, devices exchange the parts and each
    adds up its own: as many bytes, in a fixed order.
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
        parts.append(lambda at=(start,), end=(end,), shape=shape: jax.lax.slice(flat, at, end).reshape(shape))
        start = end
    return parts
