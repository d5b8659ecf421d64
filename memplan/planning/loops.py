"""Chooses the residuals of a pair of loops: a forward loop, and the backward loop that reads its stacks.

All trips of a loop are alike, so one choice holds for all: a value of the body is stacked, on the device or on the
host, or the backward body recomputes it from the others. For a given price per byte the cheapest choice is a minimum
cut; a sweep over prices gives the candidates.

The first trips may be in segments, which stack nothing: what is carried into a segment is kept, and the backward loop
runs it again from there. A few segments take the bytes of many trips for one more run of the forward loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy  # its parts are imported where they are first used: 0.2 s, which a second start does without

from memplan.hardware.device import Device
from memplan.hardware.roofline import copy_seconds, has_triton
from memplan.planning.graph import Graph, op_seconds
from memplan.planning.problem import Pin, Where

_WRITTEN_AND_READ = 2.0  # how often a stack crosses device memory: once in each loop
_BACKWARD = 2  # times a forward trip: a product has two gradients
_SMALL = 0.01  # of a snapshot
PRICES = tuple(10.0 ** (exponent / 4) for exponent in range(-56, -31))
"""Seconds per stacked byte, from almost none to more than a step takes."""
_ENDLESS = 1 << 30  # ticks that no cut pays: more than all costs together


@dataclass(frozen=True)
class Loop:
    """A forward loop and the backward loop that reads its stacks."""

    body: Graph  # of the forward loop
    trips: int  # of either loop
    runs: int  # how often the step runs the loops, if they are inside another
    # values of the body that the backward body always has: constants, slices of arrays from outside
    given: frozenset[int]
    needed: frozenset[int]  # values of the body that the backward body reads
    carried: tuple[int, ...] = ()  # values of the body that a trip has from the trip before
    turns: bool = False  # the backward loop begins with the forward loop's last trip
    source: str = ""  # `file:line` of the forward loop, or ''
    pins: Mapping[int, Pin] = field(default_factory=dict)  # by value of the body: where its stack has to be

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes of what is carried into a trip."""
        return sum(map(self.body.nbytes, self.carried))

    @property
    def is_moved(self) -> bool:
        """Does a pin ask for other residuals than are written?"""
        return bool(self._pinned(Where.HOST, Where.RECOMPUTE))

    @property
    def pinned_host_nbytes(self) -> int:
        """Bytes of the stacks that pins put on the host."""
        return self.trips * sum(self.body.nbytes(value) for value in self._pinned(Where.HOST))

    def _pinned(self, *where: Where) -> list[int]:
        return [value for value, pin in self.pins.items() if pin.where in where]

    @property
    def stacked_by_pins(self) -> list[int]:
        """Values that pins put into a stack. Segments, which stack nothing, are no choice then."""
        return self._pinned(Where.DEVICE, Where.HOST)


@dataclass(frozen=True)
class Residuals:
    """What a forward loop keeps for its backward loop.

    Attributes:
      kept, on_host: ids of the body's values that it stacks, on the device and on the host. The backward body
        recomputes all others.
      segments, segment_trips: its first trips are in so many segments of so many trips, which stack nothing. The
        backward loop runs a segment again from its snapshot: what is carried into its first trip.
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
    def moves(self) -> bool:
        """Is anything on the host?"""
        return bool(self.on_host) or any(self.snapshots_on_host)

    @property
    def segmented_trips(self) -> int:
        return self.segments * self.segment_trips


def stacked_trips(loop: Loop, residuals: Residuals) -> int:
    """Trips whose values are stacked at once: of a segment, or those behind the segments, which are done before."""
    return max(residuals.segment_trips, loop.trips - residuals.segmented_trips)


def stacked_nbytes(loop: Loop, residuals: Residuals | None) -> int:
    """Bytes of the stacks and snapshots on the device; None: of the loop as it is written."""
    if residuals is None:
        return loop.trips * sum(map(loop.body.nbytes, loop.needed))
    # On their way to the host and back, there are two snapshots.
    snapshots = sum(
        loop.body.nbytes(value) * (2 if on_host else residuals.segments)
        for value, on_host in zip(loop.carried, residuals.snapshots_on_host, strict=False)
    )
    return snapshots + stacked_trips(loop, residuals) * sum(map(loop.body.nbytes, residuals.kept))


def host_nbytes(loop: Loop, residuals: Residuals) -> int:
    """Bytes of the stacks and snapshots on the host."""
    moved = zip(loop.carried, residuals.snapshots_on_host, strict=False)
    snapshots = residuals.segments * sum(loop.body.nbytes(value) for value, on_host in moved if on_host)
    return snapshots + loop.trips * sum(map(loop.body.nbytes, residuals.on_host))


def can_segment(loop: Loop, residuals: Residuals) -> bool:
    """Can a loop be in these segments? All in it may run again, and the backward loop begins at its end."""
    fits = residuals.segment_trips > 0 and 0 < residuals.segmented_trips <= loop.trips
    flags = len(residuals.snapshots_on_host) == len(loop.carried)
    may_run_again = not loop.stacked_by_pins and all(op.recomputable for op in loop.body.ops)
    return fits and flags and not residuals.on_host and loop.turns and may_run_again


def recomputed_ops(loop: Loop, residuals: Residuals) -> tuple[int, ...]:
    """Ops of the forward body that the backward body recomputes, in order."""
    there = loop.given.union(residuals.stacked)
    found: set[int] = set()
    waiting = list(loop.needed - there)
    while waiting:
        made = loop.body.producer[waiting.pop()]
        if made is not None and made not in found:
            found.add(made)
            waiting += [value for value in loop.body.ops[made].inputs if value not in there]
    return tuple(sorted(found))


def cheapest(loop: Loop, price: float, device: Device, offload: bool = False) -> Residuals:
    """The residuals with the least time and price of device bytes.

    Args:
      price: seconds that a byte on the device counts.
      offload: stacks may be on the host; their copies count in full.
    """
    cut = _Cut(loop, price, device, offload)
    stacked = cut.stacked()
    on_host = tuple(value for value in stacked if cut.is_on_host(value))
    return Residuals(tuple(value for value in stacked if value not in on_host), on_host)


def extra_seconds(loop: Loop, residuals: Residuals, device: Device) -> float:
    """Seconds of a step to recompute the values that are not stacked, to run segments again, and to wait for copies.

    The values of a trip are copied out while the next trip runs, and in while the one before it runs.
    """
    trip_s = _trip_seconds(loop, device)
    return _residual_seconds(loop, residuals, device, trip_s) + _segment_seconds(loop, residuals, device, trip_s)


def _residual_seconds(loop: Loop, residuals: Residuals, device: Device, trip_s: float) -> float:
    cut = _Cut(loop, 0.0, device, offload=False)
    recomputed_s = sum(map(cut.recompute_seconds, recomputed_ops(loop, residuals)))
    copied_s = sum(copy_seconds(loop.body.nbytes(value), device) for value in residuals.on_host)
    return recomputed_s + loop.runs * loop.trips * _waited_s(copied_s, trip_s)


def _segment_seconds(loop: Loop, residuals: Residuals, device: Device, trip_s: float) -> float:
    """Seconds to keep the snapshots and run all segments again."""
    again_s = residuals.segment_trips * trip_s
    moved = list(zip(loop.carried, residuals.snapshots_on_host, strict=False))
    kept_nbytes = sum(loop.body.nbytes(value) for value, on_host in moved if not on_host)
    copied_s = sum(copy_seconds(loop.body.nbytes(value), device) for value, on_host in moved if on_host)
    kept_s = _WRITTEN_AND_READ * kept_nbytes / device.memory_bandwidth
    return loop.runs * residuals.segments * (again_s + kept_s + _waited_s(copied_s, again_s))


def _waited_s(copied_s: float, forward_s: float) -> float:
    """Seconds that a forward and a backward loop wait for what is copied meanwhile."""
    return max(0.0, copied_s - forward_s) + max(0.0, copied_s - _BACKWARD * forward_s)


def _trip_seconds(loop: Loop, device: Device) -> float:
    """Seconds of a trip of the forward loop that stacks nothing: its kernels, and what is carried in and out."""
    cut = _Cut(loop, 0.0, device, offload=False)
    kernels_s = sum(map(cut.recompute_seconds, range(len(loop.body.ops)))) / (loop.trips * loop.runs)
    return kernels_s + _WRITTEN_AND_READ * loop.snapshot_nbytes / device.memory_bandwidth


@dataclass(frozen=True)
class Option:
    """Residuals of a pair of loops, with what they cost."""

    residuals: Residuals
    nbytes: int  # on the device
    seconds: float  # that they add to a step


def options(loop: Loop, device: Device, host_bytes: int) -> list[Option]:
    """The Pareto frontier of device bytes and seconds, for choices that keep the limit of the host.

    Ordered from the fastest, which takes the most bytes, to the smallest.
    """
    found = sorted(_all_options(loop, device, host_bytes > 0), key=lambda option: (option.nbytes, option.seconds))
    best = list[Option]()
    for one in found:
        fits = host_nbytes(loop, one.residuals) <= max(host_bytes, loop.pinned_host_nbytes)
        if fits and (not best or one.seconds < best[-1].seconds):
            best.append(one)
    return best[::-1]


def _all_options(loop: Loop, device: Device, offload: bool) -> Iterator[Option]:
    """For every price of a byte that makes a difference, without segments and with them."""
    trip_s = _trip_seconds(loop, device)
    for moves in dict.fromkeys((False, offload)):
        for chosen in dict.fromkeys(cheapest(loop, price, device, moves) for price in PRICES):
            seconds = _residual_seconds(loop, chosen, device, trip_s)
            for one in (chosen, *(_segmented(loop, chosen, device, offload) if not moves else ())):
                more_s = _segment_seconds(loop, one, device, trip_s)
                yield Option(one, stacked_nbytes(loop, one), seconds + more_s)


def _segmented(loop: Loop, chosen: Residuals, device: Device, offload: bool) -> Iterator[Residuals]:
    """Segments of every length, all trips in them or only the first.

    Two at least: XLA unrolls the loop over one, and may run that segment again before the trips behind it are done.
    """
    near = (False,) * len(loop.carried)
    # A counter or a key stays; a copy takes the link's latency.
    far = tuple(loop.body.nbytes(value) > _SMALL * loop.snapshot_nbytes for value in loop.carried)
    if not can_segment(loop, replace(chosen, segments=1, segment_trips=1, snapshots_on_host=near)):
        return
    for length in _grid(loop.trips // 2):
        for segments in {*_grid(loop.trips // length)[1:], loop.trips // length}:
            for on_host in dict.fromkeys((near, far if offload else near)):
                yield Residuals(chosen.kept, (), segments, length, on_host)


def _grid(most: int) -> list[int]:
    """Whole numbers from 1 to `most`, each at most a tenth more than the one before it."""
    found = [1] if most else []
    while found and found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 11 // 10)))
    return found


@dataclass(frozen=True)
class _Cut:
    """A minimum cut, with a node per available value, per recomputed value, and per op that recomputes.

    Nodes on the source's side cost: an available value its stack, which is refunded if it is recomputed; an op its
    time. A recomputed value requires its op, an op the values that it reads.
    """

    loop: Loop
    price: float
    device: Device
    offload: bool

    def stacked(self) -> list[int]:
        """Values on the source's side that are not recomputed."""
        body, given = self.loop.body, self.loop.given
        count = len(body.values)
        source = 2 * count + len(body.ops)
        sink = source + 1
        costs, bonds = list[tuple[int, int, float]](), list[tuple[int, int]]()
        free = set(range(count)) - given
        for value in free:
            stack_s = self.offload_seconds(value) if self.is_on_host(value) else self._keep_seconds(value)
            costs.append((value, sink, stack_s))
            made, may_recompute = body.producer[value], value not in self.loop.stacked_by_pins
            if value in self.loop.needed or not may_recompute:
                bonds.append((source, value))
            if value in self.loop.pins and may_recompute:
                bonds.append((value, count + value))
            if may_recompute and made is not None and body.ops[made].recomputable:
                costs.append((source, count + value, stack_s))
                bonds += [(count + value, value), (count + value, 2 * count + made)]
        for number, op in enumerate(body.ops):
            costs.append((2 * count + number, sink, self.recompute_seconds(number)))
            bonds += [(2 * count + number, value) for value in set(op.inputs) - given]
        paid = chosen(sink + 1, source, sink, costs, bonds)
        return sorted(value for value in free if paid[value] and not paid[count + value])

    def is_on_host(self, value: int) -> bool:
        """Is a value cheaper on the host, or pinned there?"""
        if value in self.loop.pins:
            return self.loop.pins[value].where is Where.HOST
        return self.offload and self.offload_seconds(value) < self._keep_seconds(value)

    def _keep_seconds(self, value: int) -> float:
        """Seconds to write and read a stack, plus the price of its bytes."""
        nbytes = self.loop.trips * self.loop.body.nbytes(value)
        return nbytes * (self.price + self.loop.runs * _WRITTEN_AND_READ / self.device.memory_bandwidth)

    def offload_seconds(self, value: int) -> float:
        """Seconds to copy every slice out and in."""
        times = 2 * self.loop.trips * self.loop.runs
        return times * copy_seconds(self.loop.body.nbytes(value), self.device)

    def recompute_seconds(self, number: int) -> float:
        """Seconds of an op; 0 if it fuses into its readers: elementwise, and statistics of rows if Triton does both."""
        body, runs = self.loop.body, self.loop.trips * self.loop.runs
        op = body.ops[number]
        if op.fusion == "elementwise" or (op.along_rows and has_triton(self.device)):
            return 0.0
        return runs * op_seconds(body, op, self.device)


def chosen(
    size: int, source: int, sink: int, costs: Sequence[tuple[int, int, float]], bonds: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Mask of the nodes on the source's side of a minimum cut.

    Selects projects of which some require others (Picard, Management Science 22(11), 1976).

    Args:
      size: nodes, the source and the sink among them.
      costs: (start, end, seconds): paid if `start` is on the source's side and `end` is not.
      bonds: (start, end): if `start` is on the source's side, so is `end`.
    """
    bonds = list(dict.fromkeys(bonds))  # csr_matrix adds up duplicates, which would overflow an int32
    tick = (sum(seconds for *_, seconds in costs) or 1.0) / (_ENDLESS - 1)
    paid, needed = np.array(costs, dtype=float).reshape(-1, 3), np.array(bonds, dtype=np.int32).reshape(-1, 2)
    ticks = np.concatenate([paid[:, 2] / tick, np.full(len(needed), _ENDLESS)]).astype(np.int32)
    starts, ends = np.concatenate([paid[:, :2].astype(np.int32), needed]).T
    network = scipy.sparse.csr_matrix((ticks, (starts, ends)), shape=(size, size))
    rest = network - scipy.sparse.csgraph.maximum_flow(network, source, sink).flow
    rest.data = np.maximum(rest.data, 0)
    rest.eliminate_zeros()
    found = np.zeros(size, dtype=bool)
    found[scipy.sparse.csgraph.breadth_first_order(rest, source, return_predecessors=False)] = True
    return found
