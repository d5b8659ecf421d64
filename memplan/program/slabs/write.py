"""Write equations of a program as loops over slabs, as a plan arranges them (`planning.slabs`).

A loop is a `lax.scan`. A trip slices the arrays that the loop reads by slabs, with the halo that
its equations need. It fetches slabs in host memory one trip ahead. The loop stacks the slabs that
it writes. It carries accumulated sums and, for cumulative equations, the row before the window
(`ops.rows`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memplan.errors import PlanMismatchError
from memplan.planning.graph import Span
from memplan.planning.slabs.choice import MOST_AT_ONCE
from memplan.planning.slabs.slabs import (
    ComputationPath,
    LoopOverSlabs,
    SlabGraph,
    Slabs,
    Walls,
    arrange,
    host_span,
    least_rows,
    padding_rows,
    slab_rows,
    wide_levels,
)
from memplan.program import compat, ops
from memplan.program.computations import computation_at, with_computation
from memplan.program.flat import Flat
from memplan.program.host_memory import HostArray
from memplan.program.interpret import bindings
from memplan.program.ops import (
    Moments,
    Reduction,
    accumulate,
    identity,
    needed,
    padding_value,
    row_before,
    run_cumulative,
    run_rows,
    shape_of,
)
from memplan.program.slabs.axis import AlongAxis, SlabAxis, slab_axis
from memplan.program.slabs.bands import with_bands
from memplan.program.slabs.early_sums import early_sums
from memplan.program.trace import InSlabs, Program
from memplan.units import located

# A loop that reads an array on the host more than so many loops after it was written holds it back
# until so many loops before itself: XLA would fetch the first slab once it is written and keep it
# for all loops that read it. A ResNet-50 of batch 1,920 then takes 16.2 GiB, and 14.7 held back.
_FETCHED_AHEAD = 2


def axis_at(flat: Flat, value: int, dim: int, banded: Flat | None = None) -> SlabAxis:
    """The axis that begins at a dimension of a value, through bands, with early sums.

    Args:
      banded: the jaxpr after `with_bands`, if the caller has it.
    """
    var = flat.values[value]
    banded = banded or with_bands(flat)
    early = early_sums(slab_axis(banded, var, dim))
    rewritten = next(jaxpr for jaxpr in (early, banded, flat) if var in jaxpr.number_of)
    return slab_axis(rewritten, var, dim)


def with_slabs(program: Program, slabs: Slabs, axis: SlabAxis | None = None) -> Program:
    """The program with ops of one computation in loops over slabs.

    Args:
      axis: the axis of the slabs, if the caller has it.
    """
    flat = computation_at(program.flat, slabs.inside)
    axis = axis or axis_at(flat, slabs.value, slabs.dim)
    first = 1 + sum(len(applied.loops) for applied in program.in_slabs)
    applied = InSlabs(
        transform=slabs,
        graph=axis.graph,
        begins=axis.flat.number_of[flat.values[slabs.value]],
        loops=tuple(Walls(axis.graph, slabs.ops).loops(slabs)),
        blocked=axis.blocked,
        first=first,
        where=_owner(program.flat, slabs.inside),
    )
    body = in_slabs(axis, slabs, first)
    return program.transformed(applied, with_computation(program.flat, slabs.inside, body))


def _owner(flat: Flat, inside: ComputationPath) -> str:
    """The equation of a computation with its `file:line`; "" for the program itself."""
    if not inside:
        return ""
    eqn = computation_at(flat, inside[:-1]).eqns[inside[-1][0]]
    return located(eqn.primitive.name, compat.relative(compat.source_of(eqn)))


def follow_slabs(program: Program, slabs: Slabs) -> Program:
    """The program with ops of one computation in the loops of a plan.

    Raises:
      PlanMismatchError: the program does not have the plan's computation, values or ops.
    """
    try:
        flat = computation_at(program.flat, slabs.inside)
    except LookupError:
        raise _mismatch() from None
    if not 0 <= slabs.value < len(flat.values):
        raise _mismatch()
    shape = shape_of(flat.values[slabs.value])
    if not (0 <= slabs.dim < len(shape) and slabs.rows > 0):
        raise _mismatch()
    axis = axis_at(flat, slabs.value, slabs.dim)
    if not _fits(slabs, axis.graph, shape[slabs.dim]):
        raise _mismatch()
    return with_slabs(program, slabs, axis)


def _fits(slabs: Slabs, graph: SlabGraph, rows: int) -> bool:
    """Does an axis have the ops and values of these slabs, and do its rows divide into them?

    Args:
      rows: of the value at which the axis begins.
    """
    ops = slabs.ops & graph.along.keys()
    values = {value for op in ops for value in graph.graph.ops[op].outputs}
    stored = slabs.stored | slabs.on_host | {value for value, _ in slabs.recomputed_in}
    if not slabs.ops or slabs.ops != ops or not stored <= values:
        return False
    min_rows = least_rows(graph, ops)
    if slabs.rows % min_rows or slabs.rows >= rows + min_rows:
        return False
    may_widen = wide_levels(slabs, Walls(graph, slabs.ops).loops(slabs.narrow))
    return (
        len(slabs.slabs_at_once) == len(slabs.at_once)
        and slabs.slabs_at_once.keys() <= may_widen
        and all(1 < count <= MOST_AT_ONCE for count in slabs.slabs_at_once.values())
        and len(slabs.device_rows) == len(slabs.on_device)
        and slabs.device_rows.keys() <= slabs.on_host
        and all(0 < at < slab_rows(graph, slabs, value) for value, at in slabs.on_device)
    )


def _mismatch() -> PlanMismatchError:
    return PlanMismatchError(
        "the plan has loops over slabs that this step does not have: it was made for another "
        "function, other shapes, or another jax version. Plan again."
    )


def in_slabs(axis: SlabAxis, slabs: Slabs, first: int = 1) -> compat.ClosedJaxpr:
    """The flat jaxpr of an axis with its ops in the loops of a plan.

    Args:
      first: number of the first loop, for its name.
    """
    return compat.dce(axis.flat.retraced(lambda *operands: _run(axis, slabs, first, operands)))


def _run(axis: SlabAxis, slabs: Slabs, first: int, operands: Sequence[Any]) -> list[Any]:
    """The results of the axis's jaxpr, with loops over slabs."""
    env: dict[Any, Any] = bindings(axis.flat.closed, operands)
    numbers = itertools.count(first)
    order = arrange(axis.graph, slabs)
    walls = Walls(axis.graph, slabs.ops)
    loops = [item for item in order if isinstance(item, LoopOverSlabs)]
    loop_results = list[Any]()  # one of each loop
    held_since = dict[Any, int]()  # by variable: the loop that wrote it or last held it back
    for item in order:
        if isinstance(item, LoopOverSlabs):
            count = len(loop_results)
            for var in (axis.flat.values[value] for value in item.reads):
                if count - held_since.get(var, count) > _FETCHED_AHEAD:
                    env[var] = _fetched_after(env[var], loop_results[-_FETCHED_AHEAD])
                    held_since[var] = count
            held_since.update((axis.flat.values[value], count) for value in item.writes)
            largest = axis.flat.eqns[item.largest_op(axis.graph.graph)]
            scope = jax.named_scope(InSlabs.scope(next(numbers)))
            with compat.source_context(largest), scope:
                loop_results.append(_Loop(axis, walls, slabs, item, loops, env).run())
            continue
        eqn = axis.flat.eqns[item]
        with compat.user_context(eqn):
            results = compat.bind(eqn, [whole(compat.read(env, atom)) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [whole(compat.read(env, atom)) for atom in axis.flat.outvars]


def _fetched_after(value: Any, result: Any) -> Any:
    """The value; its rows on the host are fetched once the result is known."""
    if isinstance(value, SplitArray):
        return replace(value, host=_fetched_after(value.host, result))
    if isinstance(value, HostArray):
        value, _ = lax.optimization_barrier((value, result))
    return value


class _Loop:
    """Writes one loop over slabs.

    Attributes:
      values: arrays, stacks of slabs and host arrays of variables outside of the loop.
      spans: rows of each variable in a trip, relative to the first row of its own slab.
      sources: variables that the loop reads by slabs, and where it reads them.
      device_rows: variables of which each slab's first rows are on the device and the others on
        the host, and how many are on the device.
      fetched: the arrays of `sources` that are in host memory.
      slabs_per_trip: how many slabs of other loops a trip takes as one.
      windows: rows of each of `fetched` that a trip reads, counted among those on the host only.
      to_host: variables that the loop writes to the host, and the windows in which later loops
        read them.
      stacked: variables that the loop stacks on the device, and the rows of a slab that it stacks.
      sums: equations whose results the loop adds up, and the variables of the results.
      whole: by number of an equation, by position, operands that the loop reads whole, some of them
        reversed (`Primitive.reversed_dims`).
    """

    def __init__(
        self,
        axis: SlabAxis,
        walls: Walls,
        slabs: Slabs,
        loop: LoopOverSlabs,
        loops: Sequence[LoopOverSlabs],
        values: dict[Any, Any],
    ):
        self.axis = axis
        self.slabs = slabs.in_level(loop.level)
        self.slabs_per_trip = self.slabs.rows // slabs.rows
        self.loop = loop
        self.values = values
        self.eqns = axis.flat.eqns
        variables = axis.flat.values
        self.trips = walls.trips(self.slabs)
        self.spans = {variables[value]: span for value, span in loop.spans.items()}
        self.sources = {variables[value]: self._source(variables[value]) for value in loop.reads}
        self.device_rows = {variables[value]: rows for value, rows in slabs.on_device}
        self.fetched = dict[Any, HostArray]()
        self.windows = dict[Any, Span]()
        for var, source in self.sources.items():
            host = source.host if isinstance(source, SplitArray) else source
            window = self._host_span(var, self.spans[var])
            if isinstance(host, HostArray) and window[0] < window[1]:
                self.fetched[var] = host
                self.windows[var] = window
        self.to_host = dict[Any, list[Span]]()
        self.stacked = dict[Any, int]()
        for value in loop.writes:
            var = variables[value]
            if value in slabs.on_host:
                readers = [reader for reader in loops if value in reader.reads]
                self.to_host[var] = [
                    walls.host_window(slabs, value, loop.level, reader) for reader in readers
                ]
            if value not in slabs.on_host or value in slabs.device_rows:
                self.stacked[var] = self.device_rows.get(var, self.slab_rows(var))
        self.sums = [(number, var) for number in loop.sums for var in self.eqns[number].outvars]
        self.whole = {number: self._read_whole(number) for number in loop.ops}

    def _read_whole(self, number: int) -> dict[int, Any]:
        """Operands, by position, that an equation does not read by slabs."""
        eqn = self.eqns[number]
        sliced = self.axis.equations[number].sliced
        operands = dict[int, Any]()
        for position, atom in enumerate(eqn.invars):
            if position not in sliced:
                operand = whole(compat.read(self.values, atom))
                operands[position] = _reversed(eqn, position, operand)
        return operands

    def slab_rows(self, var: Any) -> int:
        """Rows of a variable in a slab."""
        rows = self.slabs.rows * self.axis.scales[var]
        return rows.numerator

    def _host_span(self, var: Any, span: Span) -> Span:
        """The rows of a span that are on the host, counted among those on the host only."""
        return host_span(span, self.slab_rows(var), self.device_rows.get(var, 0))

    def _source(self, var: Any) -> Stack | HostArray | SplitArray | DeviceArray:
        value = self.values[var]
        if isinstance(value, Stack):
            return replace(value, per_trip=self.slabs_per_trip)
        if isinstance(value, HostArray):
            return replace(value, rows_per_slab=self.slab_rows(var))
        if isinstance(value, SplitArray):
            return value
        return DeviceArray(value, self.axis.dims[var], self.slab_rows(var), self.trips)

    def run(self) -> Any:
        """Run the loop, set the values of its results, and return one of the results.

        A trip writes the previous trip's slabs to the host, and fetches the next trip's slabs from
        it, so that both copies overlap with its own computation.
        """
        sums = [
            compat.varying_like(var.aval, identity(self._reduction(number), var.aval))
            for number, var in self.sums
        ]
        rows_before = {
            number: self._row_before(self.eqns[number], along)
            for number in self.loop.ops
            if (along := self.axis.equations[number]).carries
        }
        pieces = [self._first_pieces(var) for var in self.fetched]
        hosts = [self._empty(var, spans) for var, spans in self.to_host.items()]
        slabs = [
            compat.varying_like(var.aval, jnp.zeros(self._host_slab_shape(var), var.aval.dtype))
            for var in self.to_host
        ]
        carry = jnp.int32(0), sums, rows_before, pieces, hosts, slabs

        (_, sums, _, _, hosts, slabs), stacks = lax.scan(self._trip, carry, length=self.trips)

        for (number, var), total in zip(self.sums, sums, strict=True):
            self.values[var] = self._finished(number, var, total)
        for var, host, slab in zip(self.to_host, hosts, slabs, strict=True):
            self.values[var] = host.written(self.trips - 1, slab)
        for var, stack in zip(self.stacked, stacks, strict=True):
            dim = self.axis.dims[var]
            size = shape_of(var)[dim]
            if var in self.to_host:
                rows = self.trips * self.stacked[var]
                self.values[var] = SplitArray(Stack(stack, dim, rows), self.values[var], size)
            else:
                self.values[var] = Stack(stack, dim, size)
        return jax.tree.leaves((sums, stacks, slabs))[0]

    def _row_before(self, eqn: compat.JaxprEqn, along: AlongAxis) -> Any:
        """The row before the first row of a cumulative equation's result."""
        aval = compat.aval_of(eqn.outvars[0])
        return compat.varying_like(aval, row_before(eqn, along.axes, along.axis))

    def _host_slab_shape(self, var: Any) -> tuple[int, ...]:
        shape = list(shape_of(var))
        shape[self.axis.dims[var]] = self.slab_rows(var) - self.device_rows.get(var, 0)
        return tuple(shape)

    def _empty(self, var: Any, spans: Sequence[Span]) -> HostArray:
        """An uninitialized host array, padded for loops that read these windows."""
        dim = self.axis.dims[var]
        shape = list(shape_of(var))
        rows = self._host_slab_shape(var)[dim]
        if var in self.device_rows:
            shape[dim] = self.trips * rows
        padding = padding_rows(rows, spans)
        array = HostArray.empty(shape, var.aval.dtype, dim, rows, self.trips, padding)
        return compat.varying_like(var.aval, array)

    def _trip(self, carry: Any, _: None) -> Any:
        trip, sums, rows_before, pieces, hosts, previous_slabs = carry
        written = zip(hosts, previous_slabs, strict=True)
        hosts = [host.written(trip - 1, slab) for host, slab in written]

        by_var = zip(self.fetched, pieces, strict=True)
        windows = {var: joined(own_pieces, self.axis.dims[var]) for var, own_pieces in by_var}
        # The fetched slab replaces the pieces, so it comes after them. The barrier holds the
        # arrays, not the index, which XLA must see.
        host_sources, _ = lax.optimization_barrier(
            (list(self.fetched.values()), list(windows.values()))
        )
        env = dict[Any, Any]()
        for var, source in self.sources.items():
            span = self.spans[var]
            if isinstance(source, SplitArray):
                env[var] = source.rows(trip, span, windows.get(var))
            else:
                env[var] = windows[var] if var in windows else source.rows(trip, span)

        contributions = self._run_ops(trip, env, rows_before)
        sums = [
            accumulate(self._reduction(number), total, contributions[var])
            for (number, var), total in zip(self.sums, sums, strict=True)
        ]

        pieces = [
            [*self._shared_pieces(var, windows[var]), self._fetch(var, trip + 1, source)]
            for var, source in zip(self.fetched, host_sources, strict=True)
        ]
        slabs = [
            self._cut(var, env[var], (self.device_rows.get(var, 0), self.slab_rows(var)))
            for var in self.to_host
        ]
        carry = trip + 1, sums, rows_before, pieces, hosts, slabs
        stacked = self.stacked.items()
        return carry, [self._cut(var, env[var], (0, rows)) for var, rows in stacked]

    def _run_ops(
        self,
        trip: Any,
        env: dict[Any, Any],
        rows_before: dict[int, Any],
    ) -> dict[Any, Any]:
        """Add the windows of results to `env`; return the contributions to sums."""
        contributions: dict[Any, Any] = {}
        for number in self.loop.ops:
            eqn = self.eqns[number]
            with compat.user_context(eqn):
                results = self._apply(number, eqn, trip, env, rows_before)
            reduces = self.axis.equations[number].reduces
            (contributions if reduces else env).update(zip(eqn.outvars, results, strict=True))
        return contributions

    def _first_new_row(self, var: Any) -> int:
        """The first row of a trip's window that the previous trip's window does not have."""
        low, high = self.windows[var]
        return max(low, high - self.fetched[var].rows_per_slab)

    def _fetch(self, var: Any, trip: Any, source: HostArray) -> Any:
        """The rows of a trip's window that the previous window does not have."""
        return source.rows(trip, (self._first_new_row(var), self.windows[var][1]))

    def _first_pieces(self, var: Any) -> list[Any]:
        """The first trip's window: halo rows that no earlier trip fetched, and its own rows."""
        source = self.fetched[var]
        halo = self.windows[var][0], self._first_new_row(var)
        halo_rows = [source.rows(0, halo)] if halo[0] < halo[1] else []
        return [*halo_rows, self._fetch(var, 0, source)]

    def _shared_pieces(self, var: Any, window: Any) -> list[Any]:
        """The rows of this window that the next trip's window has, too."""
        low, high = self.windows[var]
        count = self._first_new_row(var) - low
        dim = self.axis.dims[var]
        return [lax.slice_in_dim(window, high - low - count, None, axis=dim)] if count else []

    def _cut(self, var: Any, window: Any, span: Span) -> Any:
        """Rows of a variable's window."""
        first = self.spans[var][0]
        if span == self.spans[var]:
            return window
        return lax.slice_in_dim(window, span[0] - first, span[1] - first, axis=self.axis.dims[var])

    def _apply(
        self,
        number: int,
        eqn: compat.JaxprEqn,
        trip: Any,
        env: Mapping[Any, Any],
        rows_before: dict[int, Any],
    ) -> Sequence[Any]:
        """The rows of an equation's results, or their contribution to a sum.

        Args:
          rows_before: by number of a cumulative equation, the row of its result before the window;
            it is replaced by the row before the next trip's window.
        """
        along = self.axis.equations[number]
        span = self._span(number, eqn)
        spans = needed(along.axes, along.axis, span)
        spans = {position: spans[position] for position in along.sliced}
        operands = self._operands(number, eqn, trip, env, spans)
        if eqn.primitive.name == "iota":
            return [self._iota(eqn, along.axis, span, trip)]
        if along.carries:
            rows = self.slab_rows(eqn.outvars[0])
            result, rows_before[number] = run_cumulative(
                eqn,
                operands[0],
                rows_before[number],
                rows,
            )
            return [result]
        if along.reduces:
            for position in along.axes.masked:
                operands[position] = jnp.zeros_like(operands[position])
        return run_rows(eqn, along.axes, along.axis, span, spans, operands)

    def _operands(
        self,
        number: int,
        eqn: compat.JaxprEqn,
        trip: Any,
        env: Mapping[Any, Any],
        spans: Mapping[int, Span],
    ) -> list[Any]:
        """The operands of an equation: these spans of rows, padded, and the others whole."""
        along = self.axis.equations[number]
        operands = list[Any]()
        for position, atom in enumerate(eqn.invars):
            if position in spans:
                operands.append(self._cut(atom, env[atom], spans[position]))
            else:
                operand = self.whole[number][position]
                operands.append(_reversed(eqn, position, operand))
        for position, rows in spans.items():
            atom = eqn.invars[position]
            fill = padding_value(eqn, along.axes, along.axis, position, operands)
            if fill is not None:
                operands[position] = self._padded(atom, operands[position], rows, trip, fill)
        return operands

    def _span(self, number: int, eqn: compat.JaxprEqn) -> Span:
        """The rows that a trip computes of an equation's results, or reduces."""
        along = self.axis.equations[number]
        if along.reduces:
            return 0, self.slab_rows(eqn.invars[along.axes.last_on(along.axis)])
        return next(self.spans[var] for var in eqn.outvars if var in self.spans)

    def _padded(self, var: Any, window: Any, span: Span, trip: Any, fill: Any) -> Any:
        """The window, with padding values in rows that the array does not have."""
        dim = self.axis.dims[var]
        rows = self.slab_rows(var)
        size = shape_of(var)[dim]
        if span[0] >= 0 and (self.trips - 1) * rows + span[1] <= size:
            return window
        row = lax.broadcasted_iota(jnp.int32, window.shape, dim) + (trip * rows + span[0])
        return jnp.where((row >= 0) & (row < size), window, jnp.asarray(fill, window.dtype))

    def _iota(self, eqn: compat.JaxprEqn, dim: int, span: Span, trip: Any) -> Any:
        """Rows of an `iota`."""
        shape = list(eqn.params["shape"])
        shape[dim] = span[1] - span[0]
        window = lax.broadcasted_iota(eqn.params["dtype"], shape, eqn.params["dimension"])
        if eqn.params["dimension"] != dim:
            return window
        offset = trip * self.slab_rows(eqn.outvars[0]) + span[0]
        return window + offset.astype(window.dtype)

    def _reduction(self, number: int) -> Reduction:
        along = self.axis.equations[number]
        return along.axes.reduced[along.axis]

    def _finished(self, number: int, var: Any, total: Any) -> Any:
        """A finished sum in its own type, added to its initial value."""
        total = total.squares if isinstance(total, Moments) else total
        total = total.astype(var.aval.dtype)
        eqn = self.eqns[number]
        for position in self.axis.equations[number].axes.masked:
            total = whole(compat.read(self.values, eqn.invars[position])) + total
        return total


def _reversed(eqn: compat.JaxprEqn, position: int, operand: Any) -> Any:
    """An operand, reversed in the dimensions in which loops hold it so."""
    dims = ops.of(eqn).reversed_dims(eqn, position)
    return lax.rev(operand, dims) if dims else operand


@dataclass(frozen=True)
class Stack:
    """An array on the device as a loop wrote it: a stack of slabs."""

    # trips first, then the array's dimensions, of which `dim` has the rows of one slab
    slabs: Any
    dim: int  # the array's dimension of rows
    size: int  # rows of the array
    per_trip: int = 1  # slabs that a trip of its reader reads as one

    @functools.cached_property
    def whole(self) -> Any:
        """The array."""
        shape = list(self.slabs.shape[1:])
        shape[self.dim] *= self.slabs.shape[0]
        rows = jnp.moveaxis(self.slabs, 0, self.dim).reshape(shape)
        return lax.slice_in_dim(rows, 0, self.size, axis=self.dim)

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array, counted from the first row of a trip's slab.

        Rows that the array does not have contain arbitrary values.
        """
        rows = self.slabs.shape[self.dim + 1]
        trips = self.slabs.shape[0]
        pieces = []
        for slab in range(span[0] // rows, -(-span[1] // rows)):
            low, high = max(span[0] - slab * rows, 0), min(span[1] - slab * rows, rows)
            starts = [jnp.zeros((), jnp.int32)] * self.slabs.ndim
            starts[0] = jnp.clip(trip * self.per_trip + slab, 0, trips - 1)
            starts[self.dim + 1] = jnp.full((), low, jnp.int32)
            sizes = [1, *self.slabs.shape[1:]]
            sizes[self.dim + 1] = high - low
            pieces.append(lax.squeeze(lax.dynamic_slice(self.slabs, starts, sizes), (0,)))
        return joined(pieces, self.dim)


@dataclass(frozen=True)
class DeviceArray:
    """An array on the device that a loop reads by slabs."""

    array: Any
    dim: int  # the array's dimension of rows
    rows_per_slab: int  # the last slab may have fewer
    trips: int

    def rows(self, trip: Any, span: Span) -> Any:
        """Rows of the array, counted from the first row of a trip's slab.

        Rows that the array does not have contain arbitrary values. The rows are sliced slab by
        slab, so that the array has either the first row of a piece or none of its rows.
        """
        rows = self.rows_per_slab
        size = self.array.shape[self.dim]
        missing = self.trips * rows - size
        pieces = []
        for slab in range(span[0] // rows, -(-span[1] // rows)):
            low, high = max(span[0], slab * rows), min(span[1], (slab + 1) * rows)
            first = trip * rows + low
            count = min(high - low, size)
            start = jnp.clip(first, 0, size - count)
            piece = lax.dynamic_slice_in_dim(self.array, start, count, self.dim)
            # the clipped piece ends with the last slab's rows: move them to its begin
            if missing > 0:
                config = [(0, missing * (dim == self.dim), 0) for dim in range(piece.ndim)]
                padded = lax.pad(piece, jnp.zeros((), piece.dtype), config)
                piece = lax.dynamic_slice_in_dim(padded, first - start, high - low, self.dim)
            pieces.append(piece)
        return joined(pieces, self.dim)


@dataclass(frozen=True)
class SplitArray:
    """An array of which each slab's first rows are on the device, and its others on the host."""

    device: Stack
    host: HostArray
    size: int  # rows of the array

    @property
    def _device_rows(self) -> int:
        """First rows of each slab that are on the device."""
        return self.device.slabs.shape[self.dim + 1]

    @property
    def dim(self) -> int:
        """The array's dimension of rows."""
        return self.device.dim

    @functools.cached_property
    def whole(self) -> Any:
        """The array, on the device."""
        trips = self.device.slabs.shape[0]
        on_device = [lax.squeeze(slab, (0,)) for slab in jnp.split(self.device.slabs, trips)]
        on_host = jnp.split(self.host.whole, trips, self.dim)
        slabs = itertools.chain(*zip(on_device, on_host, strict=True))
        return lax.slice_in_dim(joined([*slabs], self.dim), 0, self.size, axis=self.dim)

    def rows(self, trip: Any, span: Span, window: Any) -> Any:
        """Rows of the array, counted from the first row of a trip's slab.

        Rows that the array does not have contain arbitrary values.

        Args:
          window: those of the rows that are on the host, on the device; None: there are none.
        """
        on_device, on_host = self._device_rows, self.host.rows_per_slab
        rows = on_device + on_host
        first, _ = host_span(span, rows, on_device)
        pieces = list[Any]()
        for slab in range(span[0] // rows, -(-span[1] // rows)):
            low, high = max(span[0] - slab * rows, 0), min(span[1] - slab * rows, rows)
            if low < on_device:
                start = slab * on_device
                device_span = start + low, start + min(high, on_device)
                pieces.append(self.device.rows(trip, device_span))
            if high > on_device:
                start = slab * on_host - first - on_device
                low = start + max(low, on_device)
                pieces.append(lax.slice_in_dim(window, low, start + high, axis=self.dim))
        return joined(pieces, self.dim)


def joined(pieces: Sequence[Any], dim: int) -> Any:
    """The pieces, concatenated along a dimension."""
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)


def whole(value: Any) -> Any:
    """The array on the device, of a stack of slabs, a host array, a split array or an array."""
    return value.whole if isinstance(value, Stack | HostArray | SplitArray) else value
