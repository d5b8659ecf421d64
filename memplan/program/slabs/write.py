"""Write some equations of a program as loops over slabs, as a plan arranges them (`planning.slabs`).

A loop is a `lax.scan`. It slices the arrays that it reads by slabs, with the halo that its equations need; slabs in
host memory are fetched one trip ahead. It stacks the slabs that it writes. It carries accumulated sums, and for
cumulative equations the row before the window (`ops.rows`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memplan.errors import PlanMismatchError
from memplan.planning.graph import Span
from memplan.planning.slabs.slabs import (
    ComputationPath,
    LoopOverSlabs,
    Slabs,
    Walls,
    arrange,
    least_rows,
    padding_rows,
    trips_of,
)
from memplan.program import compat, places
from memplan.program.flat import Flat
from memplan.program.host_memory import HostArray
from memplan.program.interpret import bindings
from memplan.program.ops import (
    Moments,
    accumulate,
    identity,
    needed,
    padding_value,
    row_before,
    run_cumulative,
    run_rows,
    shape_of,
)
from memplan.program.slabs.axis import SlabAxis, slab_axis
from memplan.program.slabs.bands import with_bands
from memplan.program.slabs.early_sums import early_sums
from memplan.program.trace import InSlabs, Program


def axis_at(flat: Flat, value: int, dim: int, banded: Flat | None = None) -> SlabAxis:
    """The axis that begins at a dimension of a value, through bands, with sums as early as possible.

    Args:
      banded: the jaxpr `with_bands`, if it is known.
    """
    var, banded = flat.values[value], banded or with_bands(flat)
    early = early_sums(slab_axis(banded, var, dim))
    return slab_axis(next(one for one in (early, banded, flat) if var in one.number_of), var, dim)


def with_slabs(program: Program, slabs: Slabs, axis: SlabAxis | None = None) -> Program:
    """The program with ops of one of its computations in loops as planned, along their axis, if it is known."""
    flat = places.at(program.flat, slabs.inside)
    axis = axis or axis_at(flat, slabs.value, slabs.dim)
    loops = tuple(Walls(axis.graph, slabs.ops).loops(slabs))
    begins = axis.flat.number_of[flat.values[slabs.value]]
    first = 1 + sum(len(one.loops) for one in program.in_slabs)
    record = InSlabs(slabs, axis.graph, begins, loops, axis.blocked, first, _where(program.flat, slabs.inside))
    made = in_slabs(axis, slabs, first)
    return program.transform(record, places.with_computation(program.flat, slabs.inside, made))


def _where(flat: Flat, inside: ComputationPath) -> str:
    if not inside:
        return ""
    eqn = places.at(flat, inside[:-1]).eqns[inside[-1][0]]
    source = compat.relative(compat.source_of(eqn))
    return f"{eqn.primitive.name} ({source})" if source else eqn.primitive.name


def follow_slabs(program: Program, slabs: Sequence[Slabs]) -> Program:
    """The program with its ops in the loops of a plan.

    Raises:
      PlanMismatchError: it has no such computation, values or ops.
    """
    for one in slabs:
        try:
            flat = places.at(program.flat, one.inside)
        except LookupError:
            raise _mismatch() from None
        known = flat.values
        if not (0 <= one.value < len(known) and 0 <= one.dim < len(shape_of(known[one.value])) and one.rows > 0):
            raise _mismatch()
        axis = axis_at(flat, one.value, one.dim)
        graph = axis.graph
        values = frozenset(value for op in one.ops & graph.along.keys() for value in graph.graph.ops[op].outputs)
        least, rows = least_rows(graph, one.ops & graph.along.keys()), shape_of(known[one.value])[one.dim]
        whole_rows = one.ops and one.rows % least == 0 and one.rows < rows + least
        written = one.stored | one.on_host | {value for value, _ in one.recomputed_in}
        if not (one.ops <= graph.along.keys() and written <= values and whole_rows):
            raise _mismatch()
        program = with_slabs(program, one, axis)
    return program


def _mismatch() -> PlanMismatchError:
    return PlanMismatchError(
        "the plan has loops over slabs that this step does not have: it was made for another function, other shapes, "
        "or another jax version. Plan again."
    )


def in_slabs(axis: SlabAxis, slabs: Slabs, first: int = 1) -> compat.ClosedJaxpr:
    """The flat jaxpr of an axis with its ops in the loops of a plan.

    Args:
      first: number of the first loop, for its name.
    """
    return compat.dce(axis.flat.retraced(lambda *operands: _run(axis, slabs, first, operands)))


def _run(axis: SlabAxis, slabs: Slabs, first: int, operands: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = bindings(axis.flat.closed, operands)
    numbers, order = itertools.count(first), arrange(axis.graph, slabs)
    loops = [one for one in order if isinstance(one, LoopOverSlabs)]
    for one in order:
        if isinstance(one, LoopOverSlabs):
            largest = axis.flat.eqns[one.largest_op(axis.graph.graph)]
            with compat.source_context(largest), jax.named_scope(InSlabs.scope(next(numbers))):
                _Loop(axis, slabs, one, loops, known).run()
            continue
        eqn = axis.flat.eqns[one]
        with compat.user_context(eqn):
            results = compat.bind(eqn, [whole(compat.read(known, atom)) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [whole(compat.read(known, atom)) for atom in axis.flat.outvars]


class _Loop:
    """One loop over slabs."""

    def __init__(
        self, axis: SlabAxis, slabs: Slabs, loop: LoopOverSlabs, loops: Sequence[LoopOverSlabs], known: dict[Any, Any]
    ):
        self.axis, self.slabs, self.loop, self.known = axis, slabs, loop, known
        self.eqns, values = axis.flat.eqns, axis.flat.values
        self.trips = trips_of(axis.graph, slabs)
        self.spans = {values[value]: span for value, span in loop.spans.items()}
        self.sources = {values[value]: self._source(values[value]) for value in loop.reads}
        self.fetched = {var: one for var, one in self.sources.items() if isinstance(one, HostArray)}
        self.to_host = {
            values[value]: [one.spans[value] for one in loops if value in one.reads]
            for value in loop.writes
            if value in slabs.on_host
        }
        self.stacked = [values[value] for value in loop.writes if value not in slabs.on_host]
        self.sums = [(number, var) for number in loop.sums for var in self.eqns[number].outvars]
        self.whole = {number: self._read_whole(number) for number in loop.ops}

    def _read_whole(self, number: int) -> dict[int, Any]:
        """Operands, by position, that an equation does not read by slabs; built once, before the loop."""
        sliced = self.axis.equations[number].sliced
        return {
            position: whole(compat.read(self.known, atom))
            for position, atom in enumerate(self.eqns[number].invars)
            if position not in sliced
        }

    def slab_rows(self, var: Any) -> int:
        rows = self.slabs.rows * self.axis.scales[var]
        return rows.numerator

    def _source(self, var: Any) -> Stack | HostArray | Array:
        value, dim = self.known[var], self.axis.dims[var]
        if isinstance(value, Stack | HostArray):
            return value
        return Array(value, dim, self.slab_rows(var), self.trips)

    def run(self) -> None:
        """Slabs are written to the host one trip after they are made, so that the copy overlaps with computation."""
        sums = [identity(self._how(number), var.aval) for number, var in self.sums]
        before = {
            number: row_before(self.eqns[number], one.axes, one.axis)
            for number in self.loop.ops
            if (one := self.axis.equations[number]).carries
        }
        windows = [[*self._first(var), self._fetch(var, 0, one)] for var, one in self.fetched.items()]
        hosts = [self._empty(var, spans) for var, spans in self.to_host.items()]
        made = [jnp.zeros(self._slab_shape(var), var.aval.dtype) for var in self.to_host]
        begin = jnp.int32(0), sums, before, windows, hosts, made
        (_, sums, _, _, hosts, made), stacks = lax.scan(self._trip, begin, length=self.trips)
        for (number, var), total in zip(self.sums, sums, strict=True):
            self.known[var] = self._finished(number, var, total)
        for var, host, slab in zip(self.to_host, hosts, made, strict=True):
            self.known[var] = host.written(self.trips - 1, slab)
        for var, stack in zip(self.stacked, stacks, strict=True):
            self.known[var] = Stack(stack, self.axis.dims[var], shape_of(var)[self.axis.dims[var]])

    def _slab_shape(self, var: Any) -> tuple[int, ...]:
        shape = list(shape_of(var))
        shape[self.axis.dims[var]] = self.slab_rows(var)
        return tuple(shape)

    def _empty(self, var: Any, spans: Sequence[Span]) -> HostArray:
        """An empty host array, for loops that read these spans."""
        dim, rows = self.axis.dims[var], self.slab_rows(var)
        return HostArray.empty(shape_of(var), var.aval.dtype, dim, rows, self.trips, padding_rows(rows, spans))

    def _trip(self, carry: Any, _: None) -> Any:
        trip, sums, before, fetched, hosts, made = carry
        hosts = [host.written(trip - 1, slab) for host, slab in zip(hosts, made, strict=True)]
        windows = [joined(pieces, self.axis.dims[var]) for var, pieces in zip(self.fetched, fetched, strict=True)]
        env: dict[Any, Any] = dict(zip(self.fetched, windows, strict=True))
        # The fetched slab replaces the pieces, so it comes after them. The barrier holds the arrays, not the
        # index, which XLA must see.
        sources, _ = lax.optimization_barrier((list(self.fetched.values()), windows))
        for var, source in self.sources.items():
            if var not in env:
                env[var] = source.rows(trip, self.spans[var])
        added: dict[Any, Any] = {}
        for number in self.loop.ops:
            eqn = self.eqns[number]
            with compat.user_context(eqn):
                results = self._apply(number, eqn, trip, env, before)
            (added if self.axis.equations[number].reduces else env).update(zip(eqn.outvars, results, strict=True))
        sums = [
            accumulate(self._how(number), total, added[var])
            for (number, var), total in zip(self.sums, sums, strict=True)
        ]
        fetched = [
            [*self._kept(var, env[var]), self._fetch(var, trip + 1, one)]
            for var, one in zip(self.fetched, sources, strict=True)
        ]
        made = [self._slab(var, env) for var in self.to_host]
        return (trip + 1, sums, before, fetched, hosts, made), [self._slab(var, env) for var in self.stacked]

    def _new(self, var: Any) -> int:
        """The first row of a trip's window that the previous trip's window does not have."""
        return max(self.spans[var][0], self.spans[var][1] - self.slab_rows(var))

    def _fetch(self, var: Any, trip: Any, source: HostArray) -> Any:
        """The rows of a trip's window that the previous window does not have."""
        return source.rows(trip, (self._new(var), self.spans[var][1]))

    def _first(self, var: Any) -> list[Any]:
        """The other rows of the first window."""
        span = self.spans[var][0], self._new(var)
        return [self.fetched[var].rows(0, span)] if span[0] < span[1] else []

    def _kept(self, var: Any, window: Any) -> list[Any]:
        """The rows of this window that the next trip's window has, too."""
        low, high = self.spans[var]
        kept = self._new(var) - low
        return [self._cut(var, window, (high - kept, high))] if kept else []

    def _slab(self, var: Any, env: Mapping[Any, Any]) -> Any:
        return self._cut(var, env[var], (0, self.slab_rows(var)))

    def _cut(self, var: Any, window: Any, span: Span) -> Any:
        first = self.spans[var][0]
        if span == self.spans[var]:
            return window
        return lax.slice_in_dim(window, span[0] - first, span[1] - first, axis=self.axis.dims[var])

    def _apply(
        self, number: int, eqn: compat.JaxprEqn, trip: Any, env: Mapping[Any, Any], before: dict[int, Any]
    ) -> Sequence[Any]:
        """The rows of an equation's results, or their contribution to a sum; carried rows are replaced by those of the
        next trip.
        """
        one = self.axis.equations[number]
        span = self._span(number, eqn)
        spans = needed(one.axes, one.axis, span)
        spans = {position: spans[position] for position in one.sliced}
        operands = [
            self._cut(atom, env[atom], spans[position]) if position in spans else self.whole[number][position]
            for position, atom in enumerate(eqn.invars)
        ]
        for position, rows in spans.items():
            atom, fill = eqn.invars[position], padding_value(eqn, one.axes, one.axis, position, operands)
            if fill is not None:
                operands[position] = self._masked(atom, operands[position], rows, trip, fill)
        if eqn.primitive.name == "iota":
            return [self._counted(eqn, one.axis, span, trip)]
        if one.carries:
            made, before[number] = run_cumulative(eqn, operands[0], before[number], self.slab_rows(eqn.outvars[0]))
            return [made]
        if one.reduces:
            for position in one.axes.masked:
                operands[position] = jnp.zeros_like(operands[position])
        return run_rows(eqn, one.axes, one.axis, span, spans, operands)

    def _span(self, number: int, eqn: compat.JaxprEqn) -> Span:
        one = self.axis.equations[number]
        if one.reduces:
            return 0, self.slab_rows(eqn.invars[one.axes.last_on(one.axis)])
        return next(self.spans[var] for var in eqn.outvars if var in self.spans)

    def _masked(self, var: Any, window: Any, span: Span, trip: Any, fill: Any) -> Any:
        """The window, with padding values in rows that the array does not have."""
        dim, rows = self.axis.dims[var], self.slab_rows(var)
        size = shape_of(var)[dim]
        if span[0] >= 0 and (self.trips - 1) * rows + span[1] <= size:
            return window
        row = lax.broadcasted_iota(jnp.int32, window.shape, dim) + (trip * rows + span[0])
        return jnp.where((row >= 0) & (row < size), window, jnp.asarray(fill, window.dtype))

    def _counted(self, eqn: compat.JaxprEqn, dim: int, span: Span, trip: Any) -> Any:
        shape = list(eqn.params["shape"])
        shape[dim] = span[1] - span[0]
        counted = lax.broadcasted_iota(eqn.params["dtype"], shape, eqn.params["dimension"])
        if eqn.params["dimension"] != dim:
            return counted
        return counted + (trip * self.slab_rows(eqn.outvars[0]) + span[0]).astype(counted.dtype)

    def _how(self, number: int) -> str:
        one = self.axis.equations[number]
        return one.axes.reduced[one.axis]

    def _finished(self, number: int, var: Any, total: Any) -> Any:
        """A finished sum in its own type, added to its initial value."""
        total = (total.squares if isinstance(total, Moments) else total).astype(var.aval.dtype)
        eqn, one = self.eqns[number], self.axis.equations[number]
        for position in one.axes.masked:
            total = whole(compat.read(self.known, eqn.invars[position])) + total
        return total


@dataclass(frozen=True)
class Stack:
    """An array on the device as a loop wrote it: a stack of slabs."""

    slabs: Any  # trips first, then the array's dimensions, of which `dim` has the rows of one slab
    dim: int
    size: int  # rows of the array

    @functools.cached_property
    def whole(self) -> Any:
        shape = list(self.slabs.shape[1:])
        shape[self.dim] *= self.slabs.shape[0]
        return lax.slice_in_dim(jnp.moveaxis(self.slabs, 0, self.dim).reshape(shape), 0, self.size, axis=self.dim)

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array, relative to the first row of a trip's slab; arbitrary values for rows that it does not
        have.
        """
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


@dataclass(frozen=True)
class Array:
    """An array on the device that is read by slabs."""

    array: Any
    dim: int
    rows_per_slab: int  # rows of one slab; the last may have fewer
    trips: int

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array, relative to the first row of a trip's slab; arbitrary values for rows that it does not
        have.

        Sliced slab by slab, so that the array has the first row of each piece, or none of its rows.
        """
        rows, size = self.rows_per_slab, self.array.shape[self.dim]
        missing = self.trips * rows - size
        pieces = []
        for slab in range(span[0] // rows, -(-span[1] // rows)):
            low, high = max(span[0], slab * rows), min(span[1], (slab + 1) * rows)
            begin, there = trip * rows + low, min(high - low, size)
            start = jnp.clip(begin, 0, size - there)
            piece = lax.dynamic_slice_in_dim(self.array, start, there, self.dim)
            if missing > 0:  # the last slab's rows are the last of this piece
                config = [(0, missing * (dim == self.dim), 0) for dim in range(piece.ndim)]
                more = lax.pad(piece, jnp.zeros((), piece.dtype), config)
                piece = lax.dynamic_slice_in_dim(more, begin - start, high - low, self.dim)
            pieces.append(piece)
        return joined(pieces, self.dim)


def joined(pieces: Sequence[Any], dim: int) -> Any:
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)


def whole(value: Any) -> Any:
    return value.whole if isinstance(value, Stack | HostArray) else value
