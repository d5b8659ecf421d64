"""Choose slabs to compile: axes through a step's largest arrays, and the ops along them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from memplan.errors import UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.planning.slabs.choice import Choice
from memplan.planning.slabs.price import Price, Pricer, SlabLimits
from memplan.planning.slabs.slabs import SlabGraph, Slabs, Walls, least_rows, slab_rows, trips_of
from memplan.program import compat, places
from memplan.program.flat import Flat
from memplan.program.ops import shape_of
from memplan.program.slabs.axis import SlabAxis
from memplan.program.slabs.bands import with_bands
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program

_SHARES = (4, 8, 16, 32, 64)  # of the room: split ops on arrays above such a part of it; 304^3: 4.03 s without the last
_BEGINNINGS = 3  # shapes of largest arrays, at whose dimensions axes begin: a decoder's logits, scores, wide layers
_FITTING = 4  # fitting numbers of rows to try: at 304^3 the fourth is the fastest
_LESS = 0.6  # of the room: also choose for this part of it, then refine for all; 304^3 takes 3.88 s so, 4.03 without
_REFINED = 2  # of the best for each room, refined value by value: with 4 no U-Net of `bench slabs` gains a thousandth
_PAIRED = 2  # of the best of these, refined by pairs of values: 304^3 takes 3.88 s so, 4.08 without
_MOST_ELEMENTS = 1 << 31  # of an operand: above it, cuDNN's 3D kernels fail or ask for 27 to 110 GiB of workspace
_MOST_TRIPS = 1 << 14  # 0.16 s of launches; of millions, XLA of jax 0.11 does not get ready (`dynamic-slice-annotator`)
_ALIKE = (
    0.9  # of the most demanding kernel's bytes: computations with such a kernel are split, too, as alike branches are
)
_MARGIN = 0.95  # of the room: leaves space for what the estimate does not include (XLA's transposes, packing)


@dataclass(frozen=True)
class Found:
    """Slabs, and their estimated cost."""

    axis: SlabAxis
    choice: Choice
    slabs: Slabs
    price: Price

    def refined(self) -> Found:
        slabs, price = self.choice.refined(self.slabs)
        return replace(self, slabs=slabs, price=price)

    def within(self, limits: SlabLimits) -> Found:
        """Refined for other limits."""
        if limits == self.choice.limits:
            return self
        choice = replace(self.choice, limits=limits)
        slabs, price = choice.descended(self.slabs)
        return replace(self, choice=choice, slabs=slabs, price=price)

    def paired(self) -> Found:
        slabs, price = self.choice.paired(self.slabs)
        return replace(self, slabs=slabs, price=price)


@dataclass(frozen=True)
class Candidate:
    """A program in slabs, which is not yet written."""

    expected_bytes: int  # on the device, and on the host above its limit
    write: Callable[[], Program]


def slab_programs(
    program: Program, device: Device, device_bytes: int, host_bytes: int, slower: float
) -> Iterator[Candidate]:
    """The step in slabs, for slabs expected to take at most `slower` times as long, the most likely to fit first.

    The computations with the most demanding kernels are split: the program itself, branches, bodies of loops.

    Over a mesh, slabs go along dimensions that are whole on every device, and the bytes are those of one.

    Yields nothing for a step that writes into its arguments.
    """
    try:
        flat = program.flat
    except UnsupportedProgramError:
        return
    resident, most = _resident_bytes(program), int(_MARGIN * device_bytes)
    donated = frozenset(var for var, given in zip(flat.invars, program.donated, strict=True) if given)
    there = list(places.computations(places.Inner((), flat, 1, 0, _divided(program), donated)))
    largest = max(one.kernel_nbytes for one in there)
    choices = list[tuple[places.Inner, list[Found]]]()
    for one in reversed(there):  # the innermost first: slabs change the numbers of what is around their own computation
        if one.kernel_nbytes >= min(_ALIKE * largest, most - resident - one.around_nbytes):
            limits = SlabLimits(most, host_bytes, resident + one.around_nbytes)
            found = list(frontier(one.flat, device, limits, one.parts))
            choices += [(one, found)] if found else []
    for number in range(max((len(found) for _, found in choices), default=0)):
        chosen = [(one, found[min(number, len(found) - 1)]) for one, found in choices]
        whole = sum(found.choice.pricer.whole_seconds * one.trips for one, found in chosen)
        if sum(found.price.seconds * one.trips for one, found in chosen) > slower * whole:
            continue
        # what the host has no room for is as much too large
        nbytes = max(
            one.device_bytes + max(0, one.host_bytes - host_bytes) for one in (found.price for _, found in chosen)
        )
        yield Candidate(nbytes, functools.partial(_written, program, chosen))


def _written(program: Program, chosen: Sequence[tuple[places.Inner, Found]]) -> Program:
    made = program
    for one, found in chosen:
        made = with_slabs(made, replace(found.slabs, inside=one.place), found.axis if made is program else None)
    return made


def _divided(program: Program) -> dict[Any, tuple[int, ...]]:
    """For each value that an input or a constraint divides over a mesh: into how many parts along each dimension."""
    division, flat, found = program.traced.division, program.flat, dict[Any, tuple[int, ...]]()
    told = [*zip(flat.invars, division.inputs, strict=False)] if division else []
    for eqn in flat.closed.jaxpr.eqns if division else ():
        told += [(var, eqn.params.get("sharding", eqn.params.get("dst_sharding"))) for var in eqn.outvars]
    for var, sharding in told:
        shape = shape_of(var)
        if sharding is not None and math.prod(shape) and (part := sharding.shard_shape(shape)) != shape:
            found[var] = tuple(size // own for size, own in zip(shape, part, strict=True))
    return found


def frontier(
    flat: Flat, device: Device, limits: SlabLimits, divided: Mapping[Any, tuple[int, ...]] = MappingProxyType({})
) -> Iterator[Found]:
    """Slabs of the first axis along which everything large can be split, the best first.

    Args:
      divided: parts of values over a mesh, along each dimension. What an axis goes through is taken to be in as many
        parts as the one on it that is in most, so that as many devices share its work and bytes.

    If nothing is expected to fit, the best of every axis come first, since the bytes that a plan of kernels makes of
    the unsplit part are a guess.
    """
    first, others = dict[Price, Found](), list[Found]()
    for begun in _axes(flat):
        inputs = {var: parts for var, parts in divided.items() if var in begun.axis.dims}
        if any(parts[begun.axis.dims[var]] > 1 for var, parts in inputs.items()):
            continue
        together = max(map(math.prod, inputs.values()), default=1)
        best = _best(begun, device.times(together), limits.times(together))
        if any(one.choice.limits.fits(one.price) for one in best):
            yield from best
            return
        first |= {one.price: one for one in best[:1] if one.price not in first}
        others += best[1:]
    yield from first.values()
    yield from sorted(others, key=_order)


def _best(begun: _Begun, device: Device, limits: SlabLimits) -> list[Found]:
    """Slabs of an axis for all of the room and, if some fit, for less of it; the best of each refined; in order."""
    rooms = [sorted(_Search(begun, device, limits).run(), key=_order)]
    if any(limits.fits(one.price) for one in rooms[0]):
        rooms.append(sorted(_Search(begun, device, limits.less(_LESS)).run(), key=_order))
    refined = sorted((one.refined().within(limits) for room in rooms for one in room[:_REFINED]), key=_order)
    others = [*refined[_PAIRED:], *(one for room in rooms for one in room[_REFINED:])]
    best = sorted([*(one.paired() for one in refined[:_PAIRED]), *others], key=_order)
    return [*{one.slabs: one for one in best}.values()]


def _order(found: Found) -> tuple[int, float]:
    return found.choice.limits.order(found.price)


@dataclass(frozen=True)
class _Begun:
    """An axis, with the value and dimension at which it begins and its rows there."""

    axis: SlabAxis
    value: int
    dim: int
    size: int

    @property
    def split_nbytes(self) -> int:
        """Bytes of all arrays that its ops make by slabs."""
        graph = self.axis.graph
        return sum(graph.graph.nbytes(value) for value in graph.sizes if graph.maker(value, graph.along) is not None)


def _axes(flat: Flat) -> list[_Begun]:
    """The different axes through the largest arrays that a step makes, the one that splits most bytes first."""
    known, banded = flat.values, with_bands(flat)
    by_size = sorted(range(len(known)), key=lambda number: compat.nbytes_of(known[number].aval), reverse=True)
    given, found = set(flat.invars), list[_Begun]()
    largest = dict[tuple[int, ...], int]()
    for value in by_size:
        if known[value] not in given:
            largest.setdefault(shape_of(known[value]), value)
    for shape, value in itertools.islice(largest.items(), _BEGINNINGS):
        for dim, size in enumerate(shape):
            if size > 1 and not any(one.axis.dims.get(known[value]) == dim for one in found):
                found.append(_Begun(axis_at(flat, value, dim, banded), value, dim, size))
    return sorted(found, key=lambda one: one.split_nbytes, reverse=True)


@dataclass(frozen=True)
class _Search:
    """The search along one axis."""

    begun: _Begun
    device: Device
    limits: SlabLimits

    def run(self) -> Iterator[Found]:
        """For every set of large ops such that all other ops fit."""
        graph = self.begun.axis.graph
        for ops in dict.fromkeys(large_ops(graph, self._room // share) for share in _SHARES):
            if ops and _widest(graph, ops) <= self._room:
                yield from self._by_rows(ops)

    @property
    def _room(self) -> int:
        return self.limits.device_bytes - self.limits.resident_bytes

    def _by_rows(self, ops: frozenset[int]) -> Iterator[Found]:
        """Tries the fewest slabs that fit, and more: those leave more room on the device."""
        graph = self.begun.axis.graph
        least, pricer, fit = least_rows(graph, ops), Pricer(Walls(graph, ops), self.device), 0
        least *= math.ceil(self.begun.size / (least * _MOST_TRIPS))
        smallest = self._found(pricer, ops, least)
        if smallest is None or not self.limits.fits(smallest.price):
            yield from () if smallest is None else (smallest,)
            return
        for rows in _fewer(self.begun.size, least):
            found = smallest if rows == least else self._found(pricer, ops, rows)
            if found is not None and self.limits.fits(found.price):
                yield found
                fit += 1
            if fit == _FITTING:
                return

    def _found(self, pricer: Pricer, ops: frozenset[int], rows: int) -> Found | None:
        """Slabs of this many rows; None if that is one slab, or if a slab has too many elements."""
        begun = self.begun
        bare = Slabs(begun.value, begun.dim, rows, ops, frozenset(), frozenset())
        if trips_of(begun.axis.graph, bare) < 2 or _elements(begun.axis.graph, bare) >= _MOST_ELEMENTS:
            return None
        choice = Choice(pricer, bare, self.limits)
        return Found(begun.axis, choice, *choice.best())


def _elements(graph: SlabGraph, slabs: Slabs) -> int:
    """Elements of the largest slab that a kernel reads or makes; its halo may double it."""
    kernels = [number for number in slabs.ops if graph.graph.ops[number].fusion == "kernel"]
    values = {value for number in kernels for value in graph.along[number].values}
    sizes = (math.prod(graph.graph.values[value].shape) // graph.sizes[value] for value in values)
    return max(
        (size * 2 * slab_rows(graph, slabs, value) for value, size in zip(values, sizes, strict=True)), default=0
    )


def _fewer(size: int, least: int) -> Iterator[int]:
    """A half, a third, a quarter, a sixth, ... of the rows, in multiples of the least."""
    for power in itertools.count(1):
        for parts in (2**power, 3 * 2 ** (power - 1)):
            rows = max(-(-size // parts) // least, 1) * least
            yield rows
            if rows == least:
                return


def large_ops(graph: SlabGraph, nbytes: int) -> frozenset[int]:
    """Ops on the axis that read or make an array of at least `nbytes` by slabs, and light ops between two of those.

    An array counts as the widest of its shape: a reader in half precision is treated like a reader in full.
    """
    widest: dict[tuple[int, ...], int] = {}
    for value in graph.graph.values:
        widest[value.shape] = max(widest.get(value.shape, 0), value.nbytes)
    size = [widest[value.shape] for value in graph.graph.values]
    large = {
        number
        for number, one in graph.along.items()
        if any(size[value] >= nbytes for value in (*(read for read, _ in one.reads), *graph.graph.ops[number].outputs))
    }
    return frozenset(large | _between(graph, large))


def _between(graph: SlabGraph, large: set[int]) -> set[int]:
    """Ops other than kernels on paths between large ops: outside of the loops they would be walls."""
    light = {number for number in graph.along if number not in large and graph.graph.ops[number].fusion != "kernel"}
    producer, readers = graph.graph.producer, graph.readers
    behind, before = set[int](), set[int]()
    for number in sorted(light):
        sources = {producer[value] for value in graph.graph.ops[number].inputs}
        if sources & (large | behind):
            behind.add(number)
    for number in sorted(light, reverse=True):
        takers = {taker for value in graph.graph.ops[number].outputs for taker in readers.get(value, ())}
        if takers & (large | before):
            before.add(number)
    return behind & before


def _widest(graph: SlabGraph, ops: frozenset[int]) -> int:
    """The most bytes that an unsplit kernel reads and writes."""
    nbytes = graph.graph.nbytes
    return max(
        (
            sum(map(nbytes, {*op.inputs, *op.outputs}))
            for number, op in enumerate(graph.graph.ops)
            if number not in ops and op.fusion == "kernel"
        ),
        default=0,
    )


def _resident_bytes(program: Program) -> int:
    """Bytes of arguments, constants, and outputs that alias no argument."""
    flat = program.flat
    closed_over = sum(compat.nbytes_of(var.aval) for var in flat.closed.jaxpr.constvars)
    given = sum(nbytes for n, nbytes in enumerate(program.input_nbytes) if n not in program.on_host)
    donated = sum(compat.nbytes_of(var.aval) for var, gives in zip(flat.invars, program.donated, strict=True) if gives)
    made = sum(compat.nbytes_of(atom.aval) for atom in flat.outvars)
    return given + closed_over + max(made - donated, 0)
