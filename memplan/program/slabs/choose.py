"""Choose slabs to compile: axes through a step's largest arrays, and the ops along them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.errors import UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.planning.slabs.choice import Choice
from memplan.planning.slabs.cut import SlabCuts
from memplan.planning.slabs.price import Price, Pricer, SlabLimits
from memplan.planning.slabs.slabs import (
    MOST_ELEMENTS,
    SlabGraph,
    Slabs,
    Walls,
    least_rows,
    slab_rows,
    trips_of,
)
from memplan.program import compat
from memplan.program.computations import PlacedComputation, computations
from memplan.program.flat import Flat
from memplan.program.ops import shape_of
from memplan.program.slabs.axis import SlabAxis
from memplan.program.slabs.bands import with_bands
from memplan.program.slabs.write import axis_at, with_slabs
from memplan.program.trace import Program

# Split the ops on arrays above 1/4, 1/8, ... of the limit. A U-Net of 304^3 takes 4.03 s without
# the last one, 3.88 s with it.
_LARGE_SHARES = (4, 8, 16, 32, 64)
# Begin axes at every dimension of the largest arrays of this many shapes. A decoder needs three:
# its logits, its attention scores, its wide layers.
_FIRST_SHAPES = 3
# Try this many numbers of rows that fit. At 304^3 the fourth is the fastest.
_FITTING_ROWS = 4
# Also choose slabs for this share of the limit, then refine them for all of it. 304^3 takes 3.88 s
# with this second search, 4.03 s without.
_TIGHTER_SHARE = 0.6
# Refine this many of the best slabs of each search value by value. By estimate, a U-Net of 304^3
# takes 5.05 s with 4, 5.36 s with 2; four other U-Nets take as long.
_REFINED = 4
# Refine this many of the refined slabs by pairs of values, and by many values at once. 304^3 takes
# 3.88 s with pairs, 4.08 s without.
_REFINED_FURTHER = 2
# A loop has at most so many trips: 0.16 s of launches. XLA of jax 0.11 does not finish compiling
# loops of millions (`dynamic-slice-annotator`).
_MOST_TRIPS = 1 << 14
# Also split computations whose largest kernel is at least this share of the largest: alike branches
# are.
_ALIKE_SHARE = 0.9
# The estimate of a byte, before an estimate was compared with what slabs take. It includes neither
# XLA's transposes nor packing.
_ESTIMATE = 0.95
# Once they were compared, the slabs that are chosen next may take a hundredth more than the first.
_CORRECTED = 0.99
# Look for the smallest slabs if no axis has more ops. A refusal then takes 3 times as long for two
# U-Nets of 715 and 379 ops; for a ResNet-50 of 1,378 it would take 53 s instead of 17.
_MOST_OPS = 1_200
# Their loops have at most twice as many ops. Those of the U-Nets have 1.3 times as many; those of a
# ResNet-50's batch would have 27 times as many, which XLA schedules in a minute.
_MOST_COPIES = 2
# They promise to take at most 0.9 times the bytes of the most demanding kernel. Plans of their
# kernels take 0.73 to 0.81 times what they promise (three steps).
_SMALLER = 0.9
# Also those of axes that promise to take at most 1.25 times as much as the best, three at most:
# logits of 1,024 tokens by 512 words promise 68 KiB by tokens and 60 by words, and take 34 and 58.
_NEAR_SMALLEST = 1.25
_MOST_SMALLEST = 3


@dataclass(frozen=True)
class PricedSlabs:
    """Slabs, and their estimated cost."""

    axis: SlabAxis
    choice: Choice
    slabs: Slabs
    price: Price

    def refined(self) -> PricedSlabs:
        """Refined value by value."""
        return self._changed(*self.choice.refined(self.slabs))

    def within(self, limits: SlabLimits) -> PricedSlabs:
        """Refined for other limits."""
        if limits == self.choice.limits:
            return self
        other = self.priced_for(limits)
        return other._changed(*other.choice.descended(self.slabs.narrow))

    def priced_for(self, limits: SlabLimits) -> PricedSlabs:
        """The same slabs, for other limits."""
        return replace(self, choice=replace(self.choice, limits=limits))

    def paired(self) -> PricedSlabs:
        """Refined by pairs of values."""
        return self._changed(*self.choice.paired(self.slabs))

    def perturbed(self) -> PricedSlabs:
        """Refined by many values at once."""
        return self._changed(*self.choice.perturbed(self.slabs))

    def widened(self) -> PricedSlabs:
        """With several slabs at once in single loops."""
        return self._changed(*self.choice.widened(self.slabs))

    def _changed(self, slabs: Slabs, price: Price) -> PricedSlabs:
        return replace(self, slabs=slabs, price=price)

    @property
    def fits(self) -> bool:
        """Are they expected to fit the limits for which they were chosen?"""
        return self.choice.limits.fits(self.price)

    @property
    def host_excess(self) -> int:
        """Bytes above the host's limit."""
        return max(0, self.price.host_bytes - self.choice.limits.host_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes on each device; those above the host's limit would have to stay there."""
        return (self.price.device_bytes + self.host_excess) // self.choice.limits.devices

    @property
    def peak_nbytes(self) -> int:
        """The same, or the bytes of the most demanding kernel that stays whole."""
        limits = self.choice.limits
        widest = _widest_kernel_nbytes(self.axis.graph, self.slabs.ops)
        return max(self.nbytes, (limits.resident_bytes + widest) // limits.devices)

    @property
    def copies(self) -> float:
        """How often the loops have an op, on average: those that recompute it have their own."""
        loops = self.choice.pricer.walls.loops(self.slabs)
        return sum(len(loop.ops) for loop in loops) / len(self.slabs.ops)


@dataclass(frozen=True)
class SlabCandidate:
    """A program in slabs that can be written."""

    slabs: tuple[Slabs, ...]  # of the computations that are split
    expected_bytes: int  # on a device, plus what exceeds the host's limit
    expected_s: float  # of the computations that are split
    write: Callable[[], Program]


@dataclass(frozen=True)
class SlabChoices:
    """The slabs in which a step may run.

    Axes, and the cuts along them, depend on no limit: they are found once.
    """

    program: Program
    device: Device

    def programs(
        self,
        device_bytes: int,
        host_bytes: int,
        slower: float,
        estimate: float | None = None,
    ) -> Iterator[SlabCandidate]:
        """Yield the step in slabs, in several ways, the most likely to fit first.

        The computations with the most demanding kernels are split: the program itself, branches,
        bodies of loops. Over a mesh, slabs go along dimensions that every device has whole, and
        bytes are those of one device.

        Args:
          device_bytes: limit.
          host_bytes: limit.
          slower: omit slabs that are expected to take more than `slower` times as long.
          estimate: the estimate of a byte that slabs of this step take; None: not known yet.

        Yields:
          Nothing for a step that writes into its arguments.
        """
        factor = _CORRECTED * estimate if estimate else _ESTIMATE
        slabs_by_computation = self._slabs_of_computations(int(factor * device_bytes), host_bytes)
        yield from self._by_rank(slabs_by_computation, slower)

    def smallest(self, host_bytes: int) -> Iterator[SlabCandidate]:
        """Yield the step in the slabs that are expected to take the fewest bytes on the device.

        They go along the axes that promise least. No limit on the device changes them, and they are
        not refined: seconds do not count.

        Args:
          host_bytes: limit.

        Yields:
          Nothing if no slabs within the host's limit take much less than the most demanding kernel,
          or if finding and compiling them takes long.
        """
        resident = _resident_bytes(self.program)
        smallest = dict[PlacedComputation, list[PricedSlabs]]()
        nbytes = 0  # of the computations so far, split or not
        for computation, frontier in sorted(self._frontiers, key=_whole_nbytes, reverse=True):
            whole_nbytes = resident + _whole_nbytes((computation, frontier))
            if whole_nbytes <= nbytes:
                break
            limits = SlabLimits(0, host_bytes, resident + computation.around_nbytes)
            ranked = frontier.smallest(limits)
            if ranked and ranked[0].peak_nbytes <= _SMALLER * whole_nbytes:
                nbytes = max(nbytes, ranked[0].peak_nbytes)
                smallest[computation] = ranked
            else:
                nbytes = whole_nbytes
        innermost_first = [computation for computation, _ in reversed(self._frontiers)]
        yield from self._by_rank(
            [(each, smallest[each]) for each in innermost_first if each in smallest], math.inf
        )

    def _by_rank(
        self,
        slabs_by_computation: Sequence[tuple[PlacedComputation, list[PricedSlabs]]],
        slower: float,
    ) -> Iterator[SlabCandidate]:
        """Yield the step with the best slabs of each computation, then with the second best, ..."""
        count = max((len(ranked) for _, ranked in slabs_by_computation), default=0)
        for rank in range(count):
            chosen = list[tuple[PlacedComputation, PricedSlabs]]()
            seconds = 0.0
            unsplit_seconds = 0.0
            nbytes = 0
            for computation, ranked in slabs_by_computation:
                priced = ranked[min(rank, len(ranked) - 1)]
                chosen.append((computation, priced))
                seconds += computation.trips * priced.price.seconds
                unsplit_seconds += computation.trips * priced.choice.pricer.whole_seconds
                nbytes = max(nbytes, priced.nbytes)
            if seconds > slower * unsplit_seconds:
                continue
            write = functools.partial(_written, self.program, chosen)
            slabs = tuple(priced.slabs for _, priced in chosen)
            yield SlabCandidate(slabs, nbytes, seconds, write)

    def may_fit(self, device_bytes: int, host_bytes: int) -> bool:
        """Are any slabs expected to fit these limits?"""
        chosen = self._slabs_of_computations(int(_ESTIMATE * device_bytes), host_bytes)
        return bool(chosen) and all(any(slabs.fits for slabs in ranked) for _, ranked in chosen)

    def _slabs_of_computations(
        self, limit: int, host_bytes: int
    ) -> list[tuple[PlacedComputation, list[PricedSlabs]]]:
        """For each computation to split, its slabs, the best first.

        Args:
          limit: of the estimate of the bytes on the device.
        """
        if not self._frontiers:
            return []
        resident = _resident_bytes(self.program)
        largest = max(computation.kernel_nbytes for computation, _ in self._frontiers)
        slabs_by_computation = list[tuple[PlacedComputation, list[PricedSlabs]]]()
        # The innermost come first: writing slabs changes the numbers of the surrounding equations.
        for computation, frontier in reversed(self._frontiers):
            around = resident + computation.around_nbytes
            if computation.kernel_nbytes >= min(_ALIKE_SHARE * largest, limit - around):
                ranked = [*frontier.within(SlabLimits(limit, host_bytes, around))]
                if ranked:
                    slabs_by_computation.append((computation, ranked))
        return slabs_by_computation

    @functools.cached_property
    def _frontiers(self) -> Sequence[tuple[PlacedComputation, Frontier]]:
        """All computations, and the slabs in which each may run.

        Empty for a step that writes into its arguments.
        """
        try:
            flat = self.program.flat
        except UnsupportedProgramError:
            return []
        donated = frozenset(_donated(self.program))
        whole_program = PlacedComputation((), flat, 1, 0, _mesh_parts(self.program), donated)
        return [
            (computation, Frontier(computation.flat, self.device, computation.parts))
            for computation in computations(whole_program)
        ]


def _whole_nbytes(entry: tuple[PlacedComputation, Frontier]) -> int:
    """Bytes of a computation in one piece, without the program's arguments."""
    computation, _ = entry
    return computation.around_nbytes + computation.kernel_nbytes


def _written(program: Program, chosen: Sequence[tuple[PlacedComputation, PricedSlabs]]) -> Program:
    """The program with all chosen slabs."""
    written = program
    for computation, priced in chosen:
        slabs = replace(priced.slabs, inside=computation.place)
        written = with_slabs(written, slabs, priced.axis if written is program else None)
    return written


def _mesh_parts(program: Program) -> dict[Any, tuple[int, ...]]:
    """Into how many parts a mesh divides each dimension of a value.

    Inputs, constraints and `shard_map`s say it. Undivided values are left out.
    """
    division = program.traced.division
    if not division:
        return {}
    flat = program.flat
    shardings = list(zip(flat.invars, division.inputs, strict=False))
    for eqn in flat.eqns:
        sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        shardings += [(var, sharding) for var in eqn.outvars]
        if compat.is_shard_map(eqn):
            operands, results = compat.constraints_of(eqn)
            shardings += zip(eqn.outvars, results, strict=True)
            shardings += zip(eqn.invars, operands, strict=True)
    sharding_of = dict[Any, Any]()
    for atom, sharding in shardings:
        if sharding is not None and compat.is_var(atom):
            sharding_of.setdefault(atom, sharding)
    parts = dict[Any, tuple[int, ...]]()
    for var, sharding in sharding_of.items():
        shape = shape_of(var)
        if not math.prod(shape):
            continue
        shard_shape = sharding.shard_shape(shape)
        if shard_shape != shape:
            parts[var] = tuple(size // part for size, part in zip(shape, shard_shape, strict=True))
    return parts


@dataclass(frozen=True)
class Frontier:
    """The slabs in which a computation may run."""

    flat: Flat
    device: Device
    # Into how many parts a mesh divides each dimension of a value. All arrays on an axis are
    # assumed to be in as many parts as the one in most parts, so as many devices share the work.
    parts: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    # by value and dimension where an axis begins: the last slabs that were searched and fitted
    _fitting: dict[tuple[int, int], list[PricedSlabs]] = field(default_factory=dict, init=False)

    def within(self, limits: SlabLimits) -> Iterator[PricedSlabs]:
        """Yield slabs of the first axis along which everything large can be split, the best first.

        If no slabs are expected to fit, the best of every axis come first, since the bytes of the
        unsplit part are a guess: a plan of kernels may lower them.

        For limits near earlier ones, the slabs that fitted those are refined.
        """
        best_of_axes = dict[Price, PricedSlabs]()
        remaining = list[PricedSlabs]()
        for axis in self._axes:
            ranked = self._ranked(axis, limits.times(axis.devices))
            if any(priced.fits for priced in ranked):
                yield from ranked
                return
            for priced in ranked[:1]:
                best_of_axes.setdefault(priced.price, priced)
            remaining += ranked[1:]
        yield from best_of_axes.values()
        yield from sorted(remaining, key=_order)

    def smallest(self, limits: SlabLimits) -> list[PricedSlabs]:
        """The slabs that are expected to take the fewest bytes, and those of axes near them.

        There are none if finding them takes long.
        """
        if any(len(axis.axis.graph.along) > _MOST_OPS for axis in self._axes):
            return []
        by_price = dict[Price, PricedSlabs]()
        for axis in self._axes:
            priced = _AxisSearch(axis, limits.times(axis.devices)).smallest()
            if priced and priced.copies <= _MOST_COPIES and not priced.host_excess:
                by_price.setdefault(priced.price, priced)
        ranked = sorted(by_price.values(), key=lambda priced: priced.peak_nbytes)
        most_nbytes = _NEAR_SMALLEST * ranked[0].peak_nbytes if ranked else 0
        return [priced for priced in ranked if priced.peak_nbytes <= most_nbytes][:_MOST_SMALLEST]

    def _ranked(self, candidate: _CandidateAxis, limits: SlabLimits) -> list[PricedSlabs]:
        """Slabs of an axis, the best first."""
        start = candidate.value, candidate.dim
        fitting = self._fitting.get(start, [])
        if fitting and fitting[0].choice.limits == limits:
            return fitting
        adjusted = _adjusted(fitting, limits)
        if any(priced.fits for priced in adjusted):
            return adjusted
        ranked = _ranked_slabs(candidate, limits)
        self._fitting[start] = [priced for priced in ranked if priced.fits]
        return ranked

    @functools.cached_property
    def _axes(self) -> Sequence[_CandidateAxis]:
        """The axes that every device of a mesh has whole."""
        whole = list[_CandidateAxis]()
        for candidate in _candidate_axes(self.flat, self.device):
            dims = candidate.axis.dims
            on_axis = {var: parts for var, parts in self.parts.items() if var in dims}
            if all(parts[dims[var]] == 1 for var, parts in on_axis.items()):
                devices = max(map(math.prod, on_axis.values()), default=1)
                whole.append(replace(candidate, devices=devices))
        return whole


def _ranked_slabs(candidate: _CandidateAxis, limits: SlabLimits) -> list[PricedSlabs]:
    """Slabs of an axis, the best first.

    They are chosen for the limits and, if some fit, also for tighter ones. The best are refined.
    """
    searches = [sorted(_AxisSearch(candidate, limits).run(), key=_order)]
    if any(limits.fits(priced.price) for priced in searches[0]):
        tighter = limits.less(_TIGHTER_SHARE)
        searches.append(sorted(_AxisSearch(candidate, tighter).run(), key=_order))
    refined = [
        priced.refined().within(limits) for ranked in searches for priced in ranked[:_REFINED]
    ]
    unrefined = [priced for ranked in searches for priced in ranked[_REFINED:]]
    return _finished(refined, unrefined)


def _adjusted(ranked: Sequence[PricedSlabs], limits: SlabLimits) -> list[PricedSlabs]:
    """Slabs that were chosen for limits near these, the best first. The best are refined.

    That takes a sixth of the seconds of a new search. Within 0.88 to 1.02 times the bytes, slabs of
    five steps on a V100 and an A100 take 0.93 to 1.04 times as long as those of one, in the median
    1.00 times, by estimate.
    """
    if not ranked or not ranked[0].choice.limits.are_near(limits):
        return []
    refined = [priced.within(limits) for priced in ranked[:_REFINED]]
    return _finished(refined, [priced.priced_for(limits) for priced in ranked[_REFINED:]])


def _finished(refined: list[PricedSlabs], unrefined: list[PricedSlabs]) -> list[PricedSlabs]:
    """Slabs, the best first, of which the best are refined further."""
    refined = sorted(refined, key=_order)
    finished = [priced.paired().perturbed() for priced in refined[:_REFINED_FURTHER]]
    narrow = [*finished, *refined[_REFINED_FURTHER:], *unrefined]
    ranked = sorted((priced.widened() for priced in narrow), key=_order)
    return [*{priced.slabs: priced for priced in ranked}.values()]


def _order(priced: PricedSlabs) -> tuple[int, float]:
    """Sorting key: the smallest excess first, then the fastest."""
    return priced.choice.limits.order(priced.price)


@dataclass(frozen=True)
class _CandidateAxis:
    """An axis, the dimension of a value at which it begins, and the cuts made along it."""

    axis: SlabAxis
    value: int
    dim: int
    size: int  # rows of the value
    device: Device
    devices: int = 1  # that share the work
    _cuts: dict[frozenset[int], SlabCuts] = field(default_factory=dict, init=False)

    def cuts(self, ops: frozenset[int]) -> SlabCuts:
        """The cuts of loops with these ops."""
        if ops not in self._cuts:
            pricer = Pricer(Walls(self.axis.graph, ops), self.device.times(self.devices))
            self._cuts[ops] = SlabCuts(pricer)
        return self._cuts[ops]

    @property
    def split_nbytes(self) -> int:
        """Bytes of all arrays that the axis's ops make by slabs."""
        graph = self.axis.graph
        return sum(
            graph.graph.nbytes(
                value,
            )
            for value in graph.sizes
            if graph.maker(value, graph.along) is not None
        )


def _candidate_axes(flat: Flat, device: Device) -> list[_CandidateAxis]:
    """The different axes through the largest arrays that a step makes.

    The axis that splits most bytes comes first.
    """
    variables = flat.values
    banded = with_bands(flat)
    inputs = set(flat.invars)
    by_size = sorted(
        range(len(variables)),
        key=lambda value: compat.nbytes_of(variables[value].aval),
        reverse=True,
    )
    largest = dict[tuple[int, ...], int]()
    for value in by_size:
        if variables[value] not in inputs:
            largest.setdefault(shape_of(variables[value]), value)

    candidates = list[_CandidateAxis]()
    for shape, value in itertools.islice(largest.items(), _FIRST_SHAPES):
        for dim, size in enumerate(shape):
            is_on_axis = any(
                candidate.axis.dims.get(
                    variables[value],
                )
                == dim
                for candidate in candidates
            )
            if size > 1 and not is_on_axis:
                axis = axis_at(flat, value, dim, banded)
                candidates.append(_CandidateAxis(axis, value, dim, size, device))
    return sorted(candidates, key=lambda candidate: candidate.split_nbytes, reverse=True)


@dataclass(frozen=True)
class _AxisSearch:
    """The search along one axis."""

    candidate: _CandidateAxis
    limits: SlabLimits

    def run(self) -> Iterator[PricedSlabs]:
        """Yield slabs of every set of large ops such that all other ops fit."""
        graph = self.candidate.axis.graph
        limit = self.limits.device_bytes - self.limits.resident_bytes
        for ops in dict.fromkeys(large_ops(graph, limit // share) for share in _LARGE_SHARES):
            if ops and _widest_kernel_nbytes(graph, ops) <= limit:
                yield from self._by_rows(ops)

    def smallest(self) -> PricedSlabs | None:
        """All ops along the axis, in slabs of the fewest rows."""
        ops = frozenset(self.candidate.axis.graph.along)
        return self._best(ops, self._least_rows(ops)) if ops else None

    def _by_rows(self, ops: frozenset[int]) -> Iterator[PricedSlabs]:
        """Try the fewest slabs that fit, then more: smaller slabs take less device memory."""
        size = self.candidate.size
        min_rows = self._least_rows(ops)
        smallest = self._best(ops, min_rows)
        if smallest is None:
            return
        if not self.limits.fits(smallest.price):
            yield smallest
            return
        fitting = 0
        for rows in _fractions(size, min_rows):
            priced = smallest if rows == min_rows else self._fastest(ops, rows)
            if priced is not None:
                yield priced
                fitting += 1
            if fitting == _FITTING_ROWS:
                return

    def _least_rows(self, ops: frozenset[int]) -> int:
        """The fewest rows that a slab can have."""
        rows = least_rows(self.candidate.axis.graph, ops)
        return rows * math.ceil(self.candidate.size / (rows * _MOST_TRIPS))

    def _best(self, ops: frozenset[int], rows: int) -> PricedSlabs | None:
        """The fastest slabs of this many rows that fit, or the smallest."""
        choice = self._choice(ops, rows)
        return PricedSlabs(self.candidate.axis, choice, *choice.best()) if choice else None

    def _fastest(self, ops: frozenset[int], rows: int) -> PricedSlabs | None:
        """The fastest slabs of this many rows that fit."""
        axis = self.candidate.axis
        choice = self._choice(ops, rows)
        fastest = choice.fastest() if choice else None
        return PricedSlabs(axis, choice, *fastest) if choice and fastest else None

    def _choice(self, ops: frozenset[int], rows: int) -> Choice | None:
        """Slabs of this many rows; None if one slab has all rows, or has too many elements."""
        candidate = self.candidate
        graph = candidate.axis.graph
        nothing_stored = Slabs(candidate.value, candidate.dim, rows, ops, frozenset(), frozenset())
        if trips_of(graph, nothing_stored) < 2:
            return None
        if _largest_slab_elements(graph, nothing_stored) >= MOST_ELEMENTS:
            return None
        return Choice(candidate.cuts(ops), nothing_stored, self.limits)


def _largest_slab_elements(graph: SlabGraph, slabs: Slabs) -> int:
    """Elements of the largest slab that a kernel reads or makes; a halo may double a slab."""
    kernels = [op for op in slabs.ops if graph.graph.ops[op].fusion == "kernel"]
    values = {value for op in kernels for value in graph.along[op].values}
    largest = 0
    for value in values:
        rows = slab_rows(graph, slabs, value)
        largest = max(largest, graph.row_elements(value) * 2 * rows)
    return largest


def _fractions(size: int, min_rows: int) -> Iterator[int]:
    """Yield a half, a third, a quarter, a sixth, ... of the rows, in multiples of the minimum."""
    for power in itertools.count(1):
        for parts in (2**power, 3 * 2 ** (power - 1)):
            rows = max(-(-size // parts) // min_rows, 1) * min_rows
            yield rows
            if rows == min_rows:
                return


def large_ops(graph: SlabGraph, nbytes: int) -> frozenset[int]:
    """Ops that read or make an array of at least `nbytes` by slabs, and ops between them.

    An array counts as the widest of its shape: a reader in half precision is treated like a reader
    in full precision.
    """
    widest: dict[tuple[int, ...], int] = {}
    for value in graph.graph.values:
        widest[value.shape] = max(widest.get(value.shape, 0), value.nbytes)
    widest_nbytes = [widest[value.shape] for value in graph.graph.values]
    large = set[int]()
    for op, along in graph.along.items():
        read = (value for value, _ in along.reads)
        if any(widest_nbytes[value] >= nbytes for value in (*read, *graph.graph.ops[op].outputs)):
            large.add(op)
    return frozenset(large | _between(graph, large))


def _between(graph: SlabGraph, large: set[int]) -> set[int]:
    """Ops other than kernels on paths between large ops; outside of loops they would be walls."""
    light = {op for op in graph.along if op not in large and graph.graph.ops[op].fusion != "kernel"}
    producer = graph.graph.producer
    after, before = set[int](), set[int]()
    for op in sorted(light):
        sources = {producer[value] for value in graph.graph.ops[op].inputs}
        if sources & (large | after):
            after.add(op)
    for op in sorted(light, reverse=True):
        outputs = graph.graph.ops[op].outputs
        readers = {reader for value in outputs for reader in graph.readers.get(value, ())}
        if readers & (large | before):
            before.add(op)
    return after & before


def _widest_kernel_nbytes(graph: SlabGraph, ops: frozenset[int]) -> int:
    """The most bytes that a kernel outside of `ops` reads and writes."""
    nbytes = graph.graph.nbytes
    return max(
        (
            sum(map(nbytes, {*op.inputs, *op.outputs}))
            for number, op in enumerate(graph.graph.ops)
            if number not in ops and op.fusion == "kernel"
        ),
        default=0,
    )


def _donated(program: Program) -> list[Any]:
    """The inputs whose buffers the step's outputs may take."""
    inputs = zip(program.flat.invars, program.donated, strict=True)
    return [var for var, is_donated in inputs if is_donated]


def _resident_bytes(program: Program) -> int:
    """Bytes of arguments, constants, and outputs that alias no argument."""
    flat = program.flat
    constants = sum(compat.nbytes_of(var.aval) for var in flat.closed.jaxpr.constvars)
    inputs = sum(
        nbytes
        for position, nbytes in enumerate(
            program.input_nbytes,
        )
        if position not in program.on_host
    )
    donated = sum(compat.nbytes_of(var.aval) for var in _donated(program))
    outputs = sum(compat.nbytes_of(atom.aval) for atom in flat.outvars)
    return inputs + constants + max(outputs - donated, 0)
