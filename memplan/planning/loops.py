"""Chooses the residuals of a pair of loops, or of a branch of a conditional.

A pair is a forward loop and the backward loops that read its stacks. All trips of a loop are alike,
so one choice holds for all: a value of the body is stacked, on the device or on the host, or the
backward bodies recompute it from the others. For a given price per byte the cheapest choice is a
minimum cut; a sweep over prices gives the candidates. A branch is a loop of one trip.

The first trips may be in segments, which stack nothing: the values that are carried into a segment
are kept, and the backward loop runs the segment again from there. A few segments take the bytes of
few trips for one more run of the forward loop.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy  # its parts are imported where they are first used: 0.2 s that a second start saves

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds, has_triton
from memplan.planning.graph import Graph, op_seconds
from memplan.planning.problem import Pin, Where

_WRITTEN_AND_READ = 2.0  # how often a stack crosses device memory: once in each loop
_BACKWARD = 2  # forward trips that a backward trip takes: a product has two gradients
_SMALL = 0.01  # carried values below this share of a snapshot stay on the device
PRICES = tuple(10.0 ** (exponent / 4) for exponent in range(-56, -31))
"""Seconds per stacked byte, from almost none to more than a step takes."""
_ENDLESS = 1 << 30  # ticks that no cut pays: more than all costs together


@dataclass(frozen=True)
class Loop:
    """A forward loop and the backward loops that read its stacks, or a branch: one trip."""

    body: Graph  # of the forward loop
    trips: int  # of either loop
    runs: int  # how often the step runs the loops, if they are inside another
    # values of the body that the backward body always has: constants, slices of outside arrays
    available: frozenset[int]
    needed: frozenset[int]  # values of the body that the backward body reads
    carried: tuple[int, ...] = ()  # values of the body that a trip has from the trip before
    reverses: bool = False  # does the backward loop begin with the forward loop's last trip?
    source: str = ""  # `file:line` of the forward loop, or ''
    pins: Mapping[int, Pin] = field(default_factory=dict)  # by value of the body, for its stack
    # how many of its stacks exist at once: the trips of the loops between it and its backward loop
    copies: int = 1
    # the conditionals around it, each with the branch that it is in: (its place, the branch)
    branches: tuple[tuple[tuple[int, ...], int], ...] = ()
    may_use_host: bool = True  # may its stacks be in host memory?
    readers: int = 1  # how many backward loops read its stacks; each recomputes for itself
    # do its stacks stay until the end of a conditional that has the backward loop in its branches?
    is_in_branch: bool = False

    @property
    def is_branch(self) -> bool:
        """Is it a branch of a conditional, which runs once?"""
        return self.trips == 1 and not self.carried and bool(self.branches)

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes of the values that are carried into a trip."""
        return sum(map(self.body.nbytes, self.carried))

    @property
    def has_moving_pins(self) -> bool:
        """Do the pins require other residuals than the program's?"""
        return bool(self._pinned(Where.HOST, Where.RECOMPUTE))

    @property
    def pinned_host_nbytes(self) -> int:
        """Bytes of the stacks that pins put on the host."""
        return self.trips * sum(self.body.nbytes(value) for value in self._pinned(Where.HOST))

    def _pinned(self, *where: Where) -> list[int]:
        return [value for value, pin in self.pins.items() if pin.where in where]

    @property
    def stacked_by_pins(self) -> list[int]:
        """Values that pins put into a stack. They rule out segments, which stack nothing."""
        return self._pinned(Where.DEVICE, Where.HOST)


@dataclass(frozen=True)
class Residuals:
    """The values that a forward loop keeps for its backward loop.

    Attributes:
      kept, on_host: ids of the body's values that it stacks, on the device and on the host. The
        backward body recomputes all others.
      segments, segment_trips: its first trips are in this many segments of this many trips, which
        stack nothing. The backward loop runs a segment again from its snapshot: the values that are
        carried into its first trip.
      snapshots_on_host: by carried value: are its snapshots on the host?
    """

    kept: tuple[int, ...]
    on_host: tuple[int, ...] = ()
    segments: int = 0
    segment_trips: int = 0
    snapshots_on_host: tuple[bool, ...] = ()

    @property
    def stacked(self) -> tuple[int, ...]:
        return tuple(sorted((*self.kept, *self.on_host)))

    @property
    def stacked_on_host(self) -> tuple[bool, ...]:
        """By stacked value: is it on the host?"""
        return tuple(value in self.on_host for value in self.stacked)

    @property
    def uses_host(self) -> bool:
        """Is any stack or snapshot on the host?"""
        return bool(self.on_host) or any(self.snapshots_on_host)

    @property
    def segmented_trips(self) -> int:
        return self.segments * self.segment_trips


def stacked_trips(loop: Loop, residuals: Residuals) -> int:
    """Trips whose values are stacked at once.

    They are those of one segment, or those behind all segments, whose backward trips run first.
    They are both where the stacks behind all segments stay: as operands of a conditional, or for
    another backward loop. An MLP of ten layers in a `cond` on a V100 takes 5504 MiB with six layers
    in segments of three, and 3964 without one.
    """
    behind = loop.trips - residuals.segmented_trips
    stacked = (residuals.segment_trips, behind)
    return sum(stacked) if loop.is_in_branch or loop.readers > 1 else max(stacked)


def stacked_nbytes(loop: Loop, residuals: Residuals | None) -> int:
    """Bytes of the stacks and snapshots on the device; None: of the program's own loop."""
    if residuals is None:
        return loop.copies * loop.trips * sum(map(loop.body.nbytes, loop.needed))
    # A snapshot on the host has two buffers on the device, for the copies in both directions.
    snapshots_nbytes = sum(
        loop.body.nbytes(value) * (2 if on_host else residuals.segments)
        for value, on_host in zip(loop.carried, residuals.snapshots_on_host, strict=False)
    )
    trip_nbytes = sum(map(loop.body.nbytes, residuals.kept))
    return loop.copies * (snapshots_nbytes + stacked_trips(loop, residuals) * trip_nbytes)


def host_nbytes(loop: Loop, residuals: Residuals) -> int:
    """Bytes of the stacks and snapshots on the host."""
    snapshots = zip(loop.carried, residuals.snapshots_on_host, strict=False)
    snapshot_nbytes = sum(loop.body.nbytes(value) for value, on_host in snapshots if on_host)
    trip_nbytes = sum(map(loop.body.nbytes, residuals.on_host))
    return residuals.segments * snapshot_nbytes + loop.trips * trip_nbytes


def can_segment(loop: Loop, residuals: Residuals) -> bool:
    """Can a loop be in these segments?

    All its ops must be recomputable, and the backward loop must begin at its end.
    """
    fits = residuals.segment_trips > 0 and 0 < residuals.segmented_trips <= loop.trips
    has_flags = len(residuals.snapshots_on_host) == len(loop.carried)
    is_recomputable = all(op.recomputable for op in loop.body.ops)
    may_segment = loop.reverses and not loop.stacked_by_pins and is_recomputable
    return fits and has_flags and not residuals.on_host and may_segment


def recomputed_ops(loop: Loop, residuals: Residuals) -> tuple[int, ...]:
    """Ops of the forward body that the backward body recomputes, in order."""
    available = loop.available.union(residuals.stacked)
    ops: set[int] = set()
    pending = list(loop.needed - available)
    while pending:
        op = loop.body.producer[pending.pop()]
        if op is not None and op not in ops:
            ops.add(op)
            pending += [value for value in loop.body.ops[op].inputs if value not in available]
    return tuple(sorted(ops))


def recomputed_nbytes(loop: Loop, residuals: Residuals) -> int:
    """Bytes that a backward trip holds at most of what it computes again.

    Ops that read one another are computed at once, and their results are held until the trip is
    through. What fuses into its readers takes nothing. A scan whose body is twelve layers keeps
    64 MiB and takes 1,376 if it computes all of them from the first, and keeps 832 and takes 1,496
    if it computes each from its own input.
    """
    groups = recomputed_groups(loop, residuals)
    return max((_kernels_nbytes(loop.body, group) for group in groups), default=0)


def recomputed_groups(loop: Loop, residuals: Residuals) -> list[list[int]]:
    """The ops that the backward body recomputes, in groups that read nothing of one another."""
    body = loop.body
    groups = dict[int, list[int]]()  # op -> the ops that are computed with it, itself among them
    for op in recomputed_ops(loop, residuals):
        groups[op] = [op]
        for value in body.ops[op].inputs:
            producer = body.producer[value]
            is_available = value in loop.available or value in residuals.stacked
            if is_available or producer is None or groups[producer] is groups[op]:
                continue
            joined = [*groups[producer], *groups[op]]
            groups.update((member, joined) for member in joined)
    return [sorted(group) for op, group in groups.items() if op == min(group)]


def _kernels_nbytes(body: Graph, ops: Iterable[int]) -> int:
    """Bytes of the results of ops that do not fuse into their readers."""
    kernels = (body.ops[op] for op in ops if body.ops[op].fusion != "elementwise")
    return sum(body.nbytes(value) for op in kernels for value in op.outputs)


def cheapest(loop: Loop, price: float, device: Device, offload: bool = False) -> Residuals:
    """The residuals with the least time and price of device bytes.

    Args:
      price: seconds that a byte on the device counts.
      offload: stacks may be on the host; their copies count in full.
    """
    cut = _Cut(loop, price, device, offload and loop.may_use_host)
    stacked = cut.stacked()
    on_host = tuple(value for value in stacked if cut.is_on_host(value))
    return Residuals(tuple(value for value in stacked if value not in on_host), on_host)


def extra_seconds(loop: Loop, residuals: Residuals, device: Device) -> float:
    """Seconds that residuals add to a step.

    They recompute the values that are not stacked, run segments again, and wait for copies. The
    values of a trip are copied out during the next trip, and in during the trip before it.
    """
    trip_s = _trip_seconds(loop, device)
    residual_s = _residual_seconds(loop, residuals, device, trip_s)
    return residual_s + _segment_seconds(loop, residuals, device, trip_s)


def _residual_seconds(loop: Loop, residuals: Residuals, device: Device, trip_s: float) -> float:
    """Seconds to recompute the values that are not stacked, and to wait for copies of stacks."""
    cut = _Cut(loop, 0.0, device, offload=False)
    again_s = sum(map(cut.recompute_seconds, recomputed_ops(loop, residuals)))
    recomputed_s = loop.readers * again_s
    copied_s = sum(copy_seconds(loop.body.nbytes(value), device) for value in residuals.on_host)
    return recomputed_s + loop.runs * loop.trips * _stall_seconds(copied_s, trip_s)


def _segment_seconds(loop: Loop, residuals: Residuals, device: Device, trip_s: float) -> float:
    """Seconds to keep the snapshots and run all segments again."""
    rerun_s = residuals.segment_trips * trip_s
    body = loop.body
    snapshots = list(zip(loop.carried, residuals.snapshots_on_host, strict=False))
    kept_nbytes = sum(body.nbytes(value) for value, on_host in snapshots if not on_host)
    copies = (copy_seconds(body.nbytes(value), device) for value, on_host in snapshots if on_host)
    copied_s = sum(copies)
    kept_s = _WRITTEN_AND_READ * kept_nbytes / device.achieved_bandwidth
    segment_s = loop.readers * rerun_s + kept_s + _stall_seconds(copied_s, rerun_s)
    return loop.runs * residuals.segments * segment_s


def _stall_seconds(copied_s: float, forward_s: float) -> float:
    """Seconds that a forward and a backward loop wait for copies that overlap with them."""
    return max(0.0, copied_s - forward_s) + max(0.0, copied_s - _BACKWARD * forward_s)


def _trip_seconds(loop: Loop, device: Device) -> float:
    """Seconds of a trip of the forward loop that stacks nothing.

    They are those of its kernels and of reading and writing the carried values.
    """
    cut = _Cut(loop, 0.0, device, offload=False)
    runs = loop.trips * loop.runs
    kernels_s = sum(map(cut.recompute_seconds, range(len(loop.body.ops)))) / runs
    return kernels_s + _WRITTEN_AND_READ * loop.snapshot_nbytes / device.achieved_bandwidth


@dataclass(frozen=True)
class Option:
    """Residuals of a pair of loops, with their costs."""

    residuals: Residuals
    nbytes: int  # of stacks and snapshots on the device
    seconds: float  # that they add to a step
    recomputed_nbytes: int = 0  # that a backward trip holds of what it computes again

    @property
    def total_nbytes(self) -> int:
        return self.nbytes + self.recomputed_nbytes


SIZES: tuple[Callable[[Option], int], ...] = (
    lambda option: option.nbytes,
    lambda option: option.total_nbytes,
)
"""What options are compared by: beside other pairs, what a trip computes again may not count."""


def option_of(loop: Loop, residuals: Residuals | None, device: Device) -> Option:
    """Residuals with their costs; None: those of the program's own loop."""
    if residuals is None:
        return Option(Residuals(tuple(loop.needed)), stacked_nbytes(loop, None), 0.0)
    seconds = extra_seconds(loop, residuals, device)
    recomputed = recomputed_nbytes(loop, residuals)
    return Option(residuals, stacked_nbytes(loop, residuals), seconds, recomputed)


def total_nbytes(loops: Sequence[Loop], chosen: Sequence[Option]) -> int:
    """Bytes of an option per pair: of all stacks, and of the largest trip.

    Only one branch of a conditional runs, so its branches share their bytes.
    """
    pairs = [(loop.branches, option.nbytes) for loop, option in zip(loops, chosen, strict=True)]
    return _nbytes_of(pairs) + max((option.recomputed_nbytes for option in chosen), default=0)


def _nbytes_of(pairs: Iterable[tuple[Sequence[tuple[tuple[int, ...], int]], int]]) -> int:
    """Bytes of pairs, each with the branches around it."""
    nbytes = 0
    by_branch = defaultdict[tuple[int, ...], dict[int, list[Any]]](dict)
    for branches, size in pairs:
        if not branches:
            nbytes += size
            continue
        (conditional, branch), *inner = branches
        by_branch[conditional].setdefault(branch, []).append((inner, size))
    largest = (max(map(_nbytes_of, inside.values())) for inside in by_branch.values())
    return nbytes + sum(largest)


def options(loop: Loop, device: Device, host_bytes: int) -> list[Option]:
    """The choices that no other beats, among those that keep the limit of the host.

    Another beats one if it takes no more seconds and no more bytes of stacks, and if it does so
    with what a backward trip computes again, which may count or not beside other pairs.

    Ordered from the fastest, which takes the most bytes.
    """
    limit = max(host_bytes, loop.pinned_host_nbytes)
    candidates = [
        option
        for option in _candidates(loop, device, host_bytes > 0)
        if host_nbytes(loop, option.residuals) <= limit
    ]
    unbeaten = {id(option) for size in SIZES for option in _frontier(candidates, size)}
    kept = [option for option in candidates if id(option) in unbeaten]
    return sorted(kept, key=lambda option: (option.seconds, option.nbytes))


def _frontier(candidates: Iterable[Option], size: Callable[[Option], int]) -> list[Option]:
    """The options that no other beats in seconds and size."""
    frontier = list[Option]()
    for option in sorted(candidates, key=lambda option: (size(option), option.seconds)):
        if not frontier or option.seconds < frontier[-1].seconds:
            frontier.append(option)
    return frontier


def _candidates(loop: Loop, device: Device, offload: bool) -> Iterator[Option]:
    """For every price of a byte that makes a difference, without segments and with them."""
    trip_s = _trip_seconds(loop, device)
    offload = offload and loop.may_use_host
    for on_host in dict.fromkeys((False, offload)):
        cuts = dict.fromkeys(cheapest(loop, price, device, on_host) for price in PRICES)
        divided = (part for cut in cuts for part in _divided(loop, cut))
        for choice in dict.fromkeys((*cuts, *divided)):
            residual_s = _residual_seconds(loop, choice, device, trip_s)
            segmented = () if on_host or choice not in cuts else _segmented(loop, choice, offload)
            recomputed = recomputed_nbytes(loop, choice)
            for residuals in (choice, *segmented):
                seconds = residual_s + _segment_seconds(loop, residuals, device, trip_s)
                yield Option(residuals, stacked_nbytes(loop, residuals), seconds, recomputed)


def _divided(loop: Loop, choice: Residuals) -> Iterator[Residuals]:
    """The choice with more values kept, so that less is computed again at once.

    Ops that the backward body computes at once are divided into 2, 4, 8 parts and so on, where the
    fewest bytes cross, and what crosses is kept. No price per byte finds this: if all layers of a
    body are alike, keeping the inputs of some is on the line between keeping all and none.
    """
    body = loop.body
    ops = recomputed_ops(loop, choice)
    made = {value: number for number, op in enumerate(ops) for value in body.ops[op].outputs}
    last_reads = {
        value: number
        for number, op in enumerate(ops)
        for value in body.ops[op].inputs
        if value in made
    }
    crossing = [
        [value for value, last in last_reads.items() if made[value] <= number < last]
        for number in range(len(ops))
    ]
    crossing_nbytes = [sum(map(body.nbytes, values)) for values in crossing]
    sizes = [_kernels_nbytes(body, [op]) for op in ops]
    parts = 2
    while parts <= sum(size > 0 for size in sizes):
        kept = set(choice.kept)
        for number in _narrowest(sizes, crossing_nbytes, parts):
            kept.update(crossing[number])
        if not any(loop.pins[value].where is Where.RECOMPUTE for value in kept & {*loop.pins}):
            divided = replace(choice, kept=tuple(sorted(kept)))
            yield _without_idle(loop, divided, sorted(kept.difference(choice.kept)))
        parts *= 2


def _without_idle(loop: Loop, choice: Residuals, values: Sequence[int]) -> Residuals:
    """The choice without those of the values that save no bytes of what is computed again."""
    nbytes = recomputed_nbytes(loop, choice)
    for value in sorted(values, key=loop.body.nbytes, reverse=True):
        fewer = replace(choice, kept=tuple(kept for kept in choice.kept if kept != value))
        if recomputed_nbytes(loop, fewer) <= nbytes:
            choice = fewer
    return choice


def _narrowest(sizes: Sequence[int], crossing_nbytes: Sequence[int], parts: int) -> list[int]:
    """Positions that divide a sequence into about this many parts of like size.

    Each is the one that the fewest bytes cross in its part, with the positions of no size behind.
    """
    part_nbytes = sum(sizes) / parts
    positions = list[int]()
    begin, nbytes = 0, 0.0
    for number, size in enumerate(sizes):
        nbytes += size
        is_last = number + 1 == len(sizes) or sizes[number + 1] > 0
        if nbytes >= part_nbytes and is_last:
            best = min(range(begin, number + 1), key=lambda n: (crossing_nbytes[n], -n))
            positions.append(best)
            begin, nbytes = number + 1, sum(sizes[best + 1 : number + 1])
    return positions


def _segmented(loop: Loop, choice: Residuals, offload: bool) -> Iterator[Residuals]:
    """Segments of every length, with all trips in them or only the first.

    There are at least two: XLA unrolls the loop over a single one, and may run that segment again
    before the trips behind it are done.
    """
    on_device = (False,) * len(loop.carried)
    # A counter or a key stays on the device: its copy would take the link's latency.
    least_nbytes = _SMALL * loop.snapshot_nbytes
    large_on_host = tuple(loop.body.nbytes(value) > least_nbytes for value in loop.carried)
    single = replace(choice, segments=1, segment_trips=1, snapshots_on_host=on_device)
    if not can_segment(loop, single):
        return
    for length in _grid(loop.trips // 2):
        for segments in {*_grid(loop.trips // length)[1:], loop.trips // length}:
            for on_host in dict.fromkeys((on_device, large_on_host if offload else on_device)):
                yield Residuals(choice.kept, (), segments, length, on_host)


def _grid(stop: int) -> list[int]:
    """Whole numbers from 1 to `stop`, each at most a tenth more than the one before it."""
    numbers = [1] if stop else []
    while numbers and numbers[-1] < stop:
        numbers.append(min(stop, max(numbers[-1] + 1, numbers[-1] * 11 // 10)))
    return numbers


@dataclass(frozen=True)
class _Cut:
    """A minimum cut over the values and ops of a body.

    There is a node per available value, per recomputed value, and per op that recomputes. Nodes on
    the source's side cost: an available value its stack, which is refunded if it is recomputed; an
    op its time. A recomputed value requires its op, an op the values that it reads.
    """

    loop: Loop
    price: float
    device: Device
    offload: bool

    def stacked(self) -> list[int]:
        """Values on the source's side that are not recomputed."""
        body = self.loop.body
        available = self.loop.available
        count = len(body.values)
        source = 2 * count + len(body.ops)
        sink = source + 1
        costs = list[tuple[int, int, float]]()
        bonds = list[tuple[int, int]]()
        undecided = set(range(count)) - available
        for value in undecided:
            on_host = self.is_on_host(value)
            stack_s = self.offload_seconds(value) if on_host else self._keep_seconds(value)
            costs.append((value, sink, stack_s))
            producer = body.producer[value]
            may_recompute = value not in self.loop.stacked_by_pins
            if value in self.loop.needed or not may_recompute:
                bonds.append((source, value))
            if value in self.loop.pins and may_recompute:
                bonds.append((value, count + value))
            if may_recompute and producer is not None and body.ops[producer].recomputable:
                costs.append((source, count + value, stack_s))
                bonds += [(count + value, value), (count + value, 2 * count + producer)]
        for number, op in enumerate(body.ops):
            again_s = self.loop.readers * self.recompute_seconds(number)
            costs.append((2 * count + number, sink, again_s))
            bonds += [(2 * count + number, value) for value in set(op.inputs) - available]
        in_source = minimum_cut(sink + 1, source, sink, costs, bonds)
        return sorted(v for v in undecided if in_source[v] and not in_source[count + v])

    def is_on_host(self, value: int) -> bool:
        """Is a value cheaper on the host, or pinned there?"""
        if value in self.loop.pins:
            return self.loop.pins[value].where is Where.HOST
        return self.offload and self.offload_seconds(value) < self._keep_seconds(value)

    def _keep_seconds(self, value: int) -> float:
        """Seconds to write and read a stack, plus the price of its bytes."""
        nbytes = self.loop.trips * self.loop.body.nbytes(value)
        traffic = self.loop.runs * _WRITTEN_AND_READ
        price = self.loop.copies * self.price
        return nbytes * (price + traffic / self.device.achieved_bandwidth)

    def offload_seconds(self, value: int) -> float:
        """Seconds to copy every slice out and in."""
        copies = 2 * self.loop.trips * self.loop.runs
        return copies * copy_seconds(self.loop.body.nbytes(value), self.device)

    def recompute_seconds(self, number: int) -> float:
        """Seconds of an op; 0 if it fuses into its readers.

        Elementwise ops fuse, and where XLA has Triton, reductions along rows.
        """
        body = self.loop.body
        runs = self.loop.trips * self.loop.runs
        op = body.ops[number]
        if op.fusion == "elementwise" or (op.along_rows and has_triton(self.device)):
            return 0.0
        return runs * op_seconds(body, op, self.device)


def minimum_cut(
    size: int,
    source: int,
    sink: int,
    costs: Sequence[tuple[int, int, float]],
    bonds: Sequence[tuple[int, int]],
) -> np.ndarray:
    """Mask of the nodes on the source's side of a minimum cut, shape (size,).

    Selects projects of which some require others (Picard, Management Science 22(11), 1976).

    Args:
      size: number of nodes, the source and the sink among them.
      costs: (start, end, seconds): paid if `start` is on the source's side and `end` is not.
      bonds: (start, end): if `start` is on the source's side, so is `end`.
    """
    bonds = list(dict.fromkeys(bonds))  # csr_matrix adds duplicates, which would overflow an int32
    tick_s = (sum(seconds for *_, seconds in costs) or 1.0) / (_ENDLESS - 1)
    cost_rows = np.array(costs, dtype=float).reshape(-1, 3)
    bond_rows = np.array(bonds, dtype=np.int32).reshape(-1, 2)
    bond_ticks = np.full(len(bond_rows), _ENDLESS)
    ticks = np.concatenate([cost_rows[:, 2] / tick_s, bond_ticks]).astype(np.int32)
    starts, ends = np.concatenate([cost_rows[:, :2].astype(np.int32), bond_rows]).T
    network = scipy.sparse.csr_matrix((ticks, (starts, ends)), shape=(size, size))
    residual = network - scipy.sparse.csgraph.maximum_flow(network, source, sink).flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    in_source = np.zeros(size, dtype=bool)
    reachable, _ = scipy.sparse.csgraph.breadth_first_order(residual, source)
    in_source[reachable] = True
    return in_source
