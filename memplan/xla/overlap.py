"""Reorders a scheduled module so that more kernels overlap its collectives, within a memory limit.

XLA's scheduler guesses seconds, and it and a plan let few collectives be in flight at once. By the
seconds of the replay, keep the links busy: start a reduction when its input is ready, a gather just
in time, and wait for the end of a collective only where its result is read. Kernels keep their
order, or feed the links. All devices run the same module, so all start the collectives in the same
order, which may differ from that before.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np

from memplan.hardware.backend import Backend
from memplan.planning.clock import Clock
from memplan.planning.legal import pair_ends
from memplan.planning.packing import live_nbytes
from memplan.planning.plan import Feeding
from memplan.planning.precedence import precedence
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import runs
from memplan.xla.buffers import problem_of
from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import BLOCKS, Instruction, Module
from memplan.xla.replay import Replay
from memplan.xla.write import write

# These instructions are heavy, and so are fusions that a library or Triton computes.
_HEAVY = frozenset({*BLOCKS, "custom-call", "dot", "convolution"})

_LINKS = "links"  # of the clock: all links between devices, which serve one collective at a time


class Overlap:
    """Orders of a module's kernels in which more of them overlap the collectives of its entry."""

    def __init__(self, module: Module, backend: Backend, replay: Replay) -> None:
        """`replay`: of the module."""
        self._module = module
        self._replay = replay
        self._problem = problem_of(module, backend, joins_pairs=False)
        self._entries: dict[Feeding, _Entry] = {}

    def order(self, limit_nbytes: int, feeding: Feeding = "") -> Sequence[int]:
        """Numbers of all kernels in the new order; increasing if none moves.

        Args:
          limit_nbytes: bytes of live temporaries up to which collectives move. The module may take
            more, since values that share an alias set are counted as they were.
          feeding: kernels move, too. Kernels that only feed collectives, such as a weight's
            gradient, run while others would wait for a reduction, or when no other is to come.
            Kernels between two collectives run when the first is done. Kernels that only wait for
            collectives, such as updates, run last, or while others would wait, or when the links
            are done with their operands if that frees bytes. Nothing moves for a collective on the
            critical path: one that a heavy kernel waits for, such as the gather of a parameter.
            "in turn": the links serve all collectives in turn. "critical first": a reduction that
            nothing heavy waits for does not delay one on the critical path by more than the links
            would idle, and counts as done only after all of those have started.
        """
        if feeding not in self._entries:
            self._entries[feeding] = _Entry(self._module, self._problem, self._replay, feeding)
        entry = self._entries[feeding]
        if not entry.pairs:
            return range(len(self._problem.kernels))
        return entry.kernels(_Simulation(entry, self._replay, limit_nbytes).order())

    def module(self, order: Sequence[int]) -> Module:
        """The module in this order."""
        return write(self._module, self._problem, runs(order))


@dataclass
class _AsyncPair:
    """A collective, by the positions of its start and its end among the units."""

    start: int
    end: int
    reader: int  # the first that waits for the end; the count of units if none does
    gathers: bool
    written_nbytes: int  # that are allocated at the start
    # (last other use, bytes) of every buffer that is live until the end
    kept_alive: Sequence[tuple[int, int]]


class _Entry:
    """The units of the entry by their positions in an order: kernels, and loops as a whole.

    Attributes:
      before: positions that must precede each.
      pairs: the collectives, by start.
      eager: positions of the units that run as soon as the collectives that they wait for are done,
        and the bytes that each frees. None unless kernels feed the links.
    """

    def __init__(self, module: Module, problem: Problem, replay: Replay, feeding: Feeding) -> None:
        self.problem = problem
        self.feeding = feeding
        kernels = problem.kernels
        ops = module.entry.ops
        buffers = problem.buffers
        self._nbytes = [buffer.nbytes * (buffer.role is Role.TEMPORARY) for buffer in buffers]
        numbers = range(len(kernels))
        self._unit_of = [[number, *problem.blocks_around(number)][-1] for number in numbers]
        self._inside: dict[int, list[int]] = defaultdict(list)  # loop of the entry -> kernels in it
        for number, unit in enumerate(self._unit_of):
            if number != unit:
                self._inside[unit].append(number)
        self._ends = {  # by start
            start: end
            for start, end in pair_ends(problem).items()
            if kernels[start].block is None and is_collective(ops[kernels[start].name].opcode)
        }
        units: Sequence[int] = [n for n, kernel in enumerate(kernels) if kernel.block is None]
        before = self._precedence(ops, units)
        movable: set[int] = set()
        relays: set[int] = set()
        if feeding:
            heavy = [unit for unit in units if _is_heavy(ops[kernels[unit].name])]
            gathers = [start for start in self._ends if _is_gather(ops[kernels[start].name])]
            seconds = {unit: self._seconds(kernels[unit].name, unit, replay) for unit in units}
            order = _feeding_order(before, self._ends, gathers, heavy, seconds, feeding)
            units = order.units
            relays = order.relays
            movable = (order.last | relays) - {*self._ends, *self._ends.values()}
        self.units = units
        self._position = {unit: position for position, unit in enumerate(units)}
        self.names = [kernels[unit].name for unit in units]
        self.before = [{self._position[earlier] for earlier in before[unit]} for unit in units]
        self._last_use: dict[int, int] = {}  # by buffer
        for number in problem.with_bodies(units):
            kernel = kernels[number]
            position = self._position[self._unit_of[number]]
            self._last_use.update(dict.fromkeys((*kernel.reads, *kernel.writes), position))
        self.eager = self._eager(movable, relays)
        self.pairs = self._pairs(ops)

    def _seconds(self, name: str, unit: int, replay: Replay) -> float:
        """What a kernel takes, or the links for the collective that it starts."""
        if unit in self._ends:
            return replay.seconds.get(name, 0.0)
        start_s, end_s = replay.spans[name]
        return 0.0 if unit in self._ends.values() else end_s - start_s

    def _precedence(
        self,
        ops: Mapping[str, Instruction],
        units: Sequence[int],
    ) -> Mapping[int, Collection[int]]:
        """Units that must precede each."""
        kernels = self.problem.kernels
        by_name = {kernels[unit].name: unit for unit in units}
        # A fusion has no side effect.
        fusions = {unit for name, unit in by_name.items() if ops[name].opcode == "fusion"}
        free = {*self._ends, *self._ends.values(), *fusions}
        required = precedence(self.problem, free=free)
        before: dict[int, Collection[int]] = {}
        for unit in units:
            names = ops[kernels[unit].name].predecessors
            before[unit] = required[unit] | {by_name[name] for name in names if name in by_name}
        return before

    def _eager(self, movable: Collection[int], relays: Collection[int]) -> Mapping[int, int]:
        """See `eager`: relays, and the other movable units that free bytes."""
        freed_nbytes = {unit: self._freed_nbytes(unit) for unit in movable}
        eager = {unit for unit in movable if freed_nbytes[unit] > 0 or unit in relays}
        return {self._position[unit]: freed_nbytes[unit] for unit in eager}

    def _freed_nbytes(self, unit: int) -> int:
        """Bytes that are freed when the unit is done, less those that it allocates."""
        reads = self.problem.kernels[unit].reads
        position = self._position[unit]
        last_reads = (buffer for buffer in reads if self._last_use[buffer] == position)
        return sum(self._nbytes[buffer] for buffer in last_reads) - self._written_nbytes(unit)

    def _written_nbytes(self, unit: int) -> int:
        """Bytes of the buffers that it allocates."""
        buffers = self.problem.buffers
        writes = self.problem.kernels[unit].writes
        return sum(self._nbytes[buffer] for buffer in writes if buffers[buffer].alias_set == buffer)

    def _pairs(self, ops: Mapping[str, Instruction]) -> Sequence[_AsyncPair]:
        buffers = self.problem.buffers
        position = self._position
        first_after: dict[int, int] = {}  # position -> the first that it must precede
        for later, before in enumerate(self.before):
            for earlier in before:
                first_after.setdefault(earlier, later)
        pairs: list[_AsyncPair] = []
        for start, end in sorted(self._ends.items(), key=lambda pair: position[pair[0]]):
            kernel = self.problem.kernels[start]
            written = {buffers[buffer].alias_set for buffer in kernel.writes}
            kept_alive = [
                (self._last_use[buffer], self._nbytes[buffer])
                for buffer in kernel.reads
                if buffers[buffer].alias_set not in written
            ]
            if position[end] not in first_after:  # an unread result is freed at the end
                kept_alive += [(position[end], self._nbytes[buffer]) for buffer in kernel.writes]
            pair = _AsyncPair(
                position[start],
                position[end],
                first_after.get(position[end], len(self.units)),
                _is_gather(ops[kernel.name]),
                self._written_nbytes(start),
                kept_alive,
            )
            pairs.append(pair)
        return pairs

    @cached_property
    def live_nbytes(self) -> np.ndarray:
        """Most bytes of live temporaries in each unit, shape (units,)."""
        order = self.problem.with_bodies(self.units)
        live = dict(zip(order, live_nbytes(self.problem, runs(order)), strict=True))
        numbers = ((*self._inside[unit], unit) for unit in self.units)
        return np.array([max(live[number] for number in inside) for inside in numbers])

    def kernels(self, order: Sequence[int]) -> list[int]:
        """All kernels in an order of positions, bodies right before their loops."""
        return self.problem.with_bodies(self.units[position] for position in order)


def _is_gather(op: Instruction) -> bool:
    return op.opcode == "all-gather-start"


def _is_heavy(op: Instruction) -> bool:
    return op.opcode in _HEAVY or (op.opcode.startswith("fusion") and op.kind == "kCustom")


@dataclass(frozen=True)
class _FeedingOrder:
    """An order of units that gives the links work."""

    units: Sequence[int]
    last: set[int]  # that only wait for collectives, and run last
    relays: set[int]  # between two collectives


def _feeding_order(
    before: Mapping[int, Collection[int]],
    ends: Mapping[int, int],
    gathers: Collection[int],
    heavy: Collection[int],
    seconds: Mapping[int, float],
    feeding: Feeding,
) -> _FeedingOrder:
    """An order of units that gives the links work.

    The critical path is what heavy kernels wait for. Its units keep their order. A collective that
    is not on it is free. Units that only feed free collectives run as early as possible; if there
    are reductions on the critical path, they fill the waits for these instead. Units that only wait
    for free collectives run last or fill such waits, and so do light kernels that only these read,
    such as a learning rate.

    Args:
      before: the units that must precede each.
      ends: of each collective's start.
      gathers: the starts of gathers.
      seconds: of kernels, and of the links by the starts of collectives.
    """
    after: dict[int, list[int]] = defaultdict(list)
    for unit, earlier_units in before.items():
        for earlier in earlier_units:
            after[earlier].append(unit)
    critical = _closure({earlier for unit in heavy for earlier in before[unit]}, before)
    free = {*ends} - critical
    feeders = _closure(free, before)
    followers = _closure(free, after)
    last = followers - feeders
    later_than_kernels = _closure(followers - {*ends, *ends.values()}, after)
    only_feeders = feeders - critical - later_than_kernels
    later_than_heavy = _closure(heavy, after)
    only_for_last = _closure(last, before) - feeders - followers - later_than_heavy
    units = _list_schedule(
        before,
        after,
        last,
        fillers=only_feeders | only_for_last,
        links=_FeedingLinks(ends, {*ends} & critical - {*gathers}, {*gathers}, seconds, feeding),
    )
    return _FeedingOrder(units, last, relays=feeders & later_than_kernels)


class _FeedingLinks:
    """The clock of a list schedule.

    Attributes:
      awaited: starts of the reductions on the critical path that are to come.
    """

    def __init__(
        self,
        ends: Mapping[int, int],
        critical: Collection[int],
        gathers: Collection[int],
        seconds: Mapping[int, float],
        feeding: Feeding,
    ) -> None:
        """`critical`: starts of the reductions on the critical path."""
        self.awaited = {*critical}
        self._ends = ends
        self._gathers = gathers
        self._seconds = seconds
        self._in_turn = feeding == "in turn"
        self._clock = Clock()
        self._done_s: dict[int, float] = {}  # end of a collective -> when the links are done
        self._postponed: list[int] = []  # starts of free reductions that the links serve later

    def is_in_flight(self, unit: int) -> bool:
        """Is it the end of a collective that the links are not done with?"""
        return self._done_s.get(unit, 0.0) > self._clock.now_s

    def run(self, unit: int) -> None:
        if unit in self._ends:
            self._start(unit)
        elif unit in self._done_s:
            done_s = self._done_s.pop(unit)
            self._clock.wait(done_s if done_s < inf else 0.0)
        else:
            self._clock.run(self._seconds[unit])

    def _start(self, unit: int) -> None:
        is_critical = unit in self.awaited
        self.awaited.discard(unit)
        if self._in_turn or is_critical:
            self._send(unit)
        elif unit not in self._gathers:  # a gather starts just in time
            self._postponed.append(unit)
            self._done_s[self._ends[unit]] = inf
        if not self.awaited:
            for start in self._postponed:
                if self._ends[start] in self._done_s:
                    self._send(start)
            self._postponed.clear()

    def _send(self, unit: int) -> None:
        _, self._done_s[self._ends[unit]] = self._clock.copy(_LINKS, self._seconds[unit])


def _list_schedule(
    before: Mapping[int, Collection[int]],
    after: Mapping[int, Sequence[int]],
    last: Collection[int],
    fillers: Collection[int],
    links: _FeedingLinks,
) -> Sequence[int]:
    """All units in their order where it is possible.

    Args:
      before, after: units that must precede or follow each.
      last: units that run after all others, or while these wait for the links.
      fillers: units that run while others wait for the links, or when no reduction is to come.
    """
    missing = {unit: len(earlier_units) for unit, earlier_units in before.items()}
    ready: list[tuple[bool, int]] = []
    ready_fillers: list[tuple[bool, int]] = []
    order: list[int] = []
    newly_ready = [unit for unit, count in missing.items() if not count]
    while newly_ready or ready or ready_fillers:
        for unit in newly_ready:
            heapq.heappush(ready_fillers if unit in fillers else ready, (unit in last, unit))
        may_fill = not (links.awaited and ready) or ready[0][0] or links.is_in_flight(ready[0][1])
        unit = _pop(ready_fillers if ready_fillers and may_fill else ready, links)
        order.append(unit)
        links.run(unit)
        newly_ready = []
        for later in after.get(unit, ()):
            missing[later] -= 1
            if not missing[later]:
                newly_ready.append(later)
    return order


def _pop(ready: list[tuple[bool, int]], links: _FeedingLinks) -> int:
    """The first unit that does not wait for the links; if all wait, the first."""
    waiting: list[tuple[bool, int]] = []
    while ready and links.is_in_flight(ready[0][1]):
        waiting.append(heapq.heappop(ready))
    _, unit = heapq.heappop(ready) if ready else waiting.pop(0)
    for entry in waiting:
        heapq.heappush(ready, entry)
    return unit


def _closure(units: Iterable[int], neighbours: Mapping[int, Collection[int]]) -> set[int]:
    """These units, and all that they lead to."""
    reached: set[int] = set()
    stack = list(units)
    while stack:
        unit = stack.pop()
        if unit not in reached:
            reached.add(unit)
            stack += neighbours.get(unit, ())
    return reached


class _Simulation:
    """One pass over the units, with a clock.

    `position`, `unit`, `start` and `end` are positions of units; a pair is meant by its number.
    """

    def __init__(self, entry: _Entry, replay: Replay, limit_nbytes: int) -> None:
        self._pairs = entry.pairs
        self._before = entry.before
        self._limit_nbytes = limit_nbytes
        self._live_nbytes = entry.live_nbytes.copy()
        self._critical_first = entry.feeding == "critical first"
        spans = (replay.spans[name] for name in entry.names)
        self._seconds = [end_s - start_s for start_s, end_s in spans]
        self._pair_of_start = {pair.start: number for number, pair in enumerate(self._pairs)}
        self._pair_of_end = {pair.end: number for number, pair in enumerate(self._pairs)}
        for position in (*self._pair_of_start, *self._pair_of_end):
            self._seconds[position] = 0.0
        self._link_s = [replay.seconds.get(entry.names[pair.start], 0.0) for pair in self._pairs]
        self._after: dict[int, list[int]] = defaultdict(list)
        for later, before in enumerate(self._before):
            for earlier in before:
                self._after[earlier].append(later)
        self._missing = [len(before) for before in self._before]
        self._clock = Clock()
        self._stalled_s = 0.0  # by which the units are behind the clock without collectives
        self._done_s: dict[int, float] = {}  # pair that started -> when the links are done with it
        numbered = enumerate(self._pairs)
        self._ready = [number for number, pair in numbered if not self._missing[pair.start]]
        self._in_flight: list[int] = []  # pairs that started and have not ended
        self._eager = entry.eager
        self._ready_eager: list[int] = []
        self._order: list[int] = []
        self._ran: set[int] = set()

    def order(self) -> Sequence[int]:
        """Positions in their new order."""
        latest_s = self._latest_s()
        for position, seconds in enumerate(self._seconds):
            if position in self._pair_of_start or position in self._pair_of_end:
                self._relieve(position)
                continue
            self._end_done(position)
            self._run_eager(position)
            if position in self._ran:
                continue
            self._require(position, position)
            self._start_during(position, seconds, latest_s)
            self._relieve(position)
            self._run(position)
            self._clock.run(seconds)
        for pair in self._pairs:
            self._require_all((pair.end,), len(self._seconds))
        return self._order

    def _start_during(self, position: int, seconds: float, latest_s: Sequence[float]) -> None:
        """Start the pairs for which the links are free while a unit runs."""
        while self._ready and self._clock.start_s(_LINKS) <= self._clock.now_s + seconds:
            soon_s = self._clock.start_s(_LINKS) + seconds - self._stalled_s
            candidates = [
                (latest_s[number] > soon_s, latest_s[number], number)
                for number in self._ready
                if latest_s[number] <= soon_s
                or not (self._pairs[number].gathers or self._delays(number, position, latest_s))
            ]
            numbers = (number for *_, number in sorted(candidates))
            fitting = (number for number in numbers if self._may_start(number, position))
            first = next(fitting, None)
            if first is None:
                return
            self._start(first, position)

    def _delays(self, number: int, position: int, latest_s: Sequence[float]) -> bool:
        """Would it delay the next pair that stalls anyway, by more than the links would idle?"""
        if not self._critical_first:
            return False
        clock_s = self._clock_s
        next_s = min(
            (
                clock_s[pair.start]
                for other, pair in enumerate(self._pairs)
                if pair.start > position
                and other not in self._done_s
                and latest_s[other] <= clock_s[pair.start]
            ),
            default=inf,
        )
        return self._link_s[number] > 2 * (next_s - clock_s[position])

    @cached_property
    def _clock_s(self) -> Sequence[float]:
        """When each unit runs, without collectives."""
        return [0.0, *accumulate(self._seconds)]

    def _latest_s(self) -> Sequence[float]:
        """By pair: its latest start without a stall, on the clock of the units alone."""
        clock_s = self._clock_s
        numbers = range(len(self._pairs))
        latest_s = [0.0 for _ in numbers]
        following_s = inf
        readers = [(self._pairs[number].reader, number) for number in numbers]
        for reader, number in sorted(readers, reverse=True):
            following_s = min(clock_s[reader], following_s) - self._link_s[number]
            latest_s[number] = following_s
        return latest_s

    def _may_start(self, number: int, position: int) -> bool:
        """Does its result fit from here to where it was allocated before?"""
        pair = self._pairs[number]
        if position >= pair.start:
            return True
        peak_nbytes = self._live_nbytes[position : pair.start].max()
        return peak_nbytes + pair.written_nbytes <= self._limit_nbytes

    def _require(self, unit: int, position: int) -> None:
        self._require_all(sorted(self._before[unit]), position)

    def _require_all(self, units: Iterable[int], position: int) -> None:
        """Start and end the collectives among these that have not."""
        for unit in units:
            started = self._pair_of_start.get(unit)
            ended = self._pair_of_end.get(unit)
            if started is not None and started not in self._done_s:
                self._require(unit, position)
                self._start(started, position)
            elif ended is not None and (ended in self._in_flight or ended not in self._done_s):
                self._require_all((self._pairs[ended].start,), position)
                self._end(ended, position)

    def _relieve(self, position: int) -> None:
        """While more is live than the limit, end the pair that frees most."""
        while candidates := self._holding(position):
            held_nbytes = sum(self._held_nbytes(number, position) for number in candidates)
            if self._live_nbytes[position] + held_nbytes <= self._limit_nbytes:
                return
            largest = max(
                candidates,
                key=lambda number: self._held_nbytes(number, position) + self._freed_nbytes(number),
            )
            self._require_all((self._pairs[largest].end,), position)
            self._run_eager(position)

    def _holding(self, position: int) -> list[int]:
        """Pairs whose end, or what runs then, frees bytes."""
        return [
            number
            for number in (*self._in_flight, *self._ready)
            if self._held_nbytes(number, position) or self._freed_nbytes(number)
        ]

    def _held_nbytes(self, number: int, position: int) -> int:
        """Bytes that are live here only because the pair has not ended where it did before."""
        pair = self._pairs[number]
        if position < pair.end:
            return 0
        return sum(nbytes for last_use, nbytes in pair.kept_alive if last_use < position)

    def _freed_nbytes(self, number: int) -> int:
        """Bytes that the eager units behind the pair free."""
        later_units = self._after[self._pairs[number].end]
        return sum(max(0, self._eager.get(unit, 0)) for unit in later_units)

    def _start(self, number: int, position: int) -> None:
        pair = self._pairs[number]
        self._ready.remove(number)
        self._live_nbytes[position : pair.start] += pair.written_nbytes
        _, self._done_s[number] = self._clock.copy(_LINKS, self._link_s[number])
        self._in_flight.append(number)
        self._run(pair.start)

    def _end_done(self, position: int) -> None:
        done = [number for number in self._in_flight if self._done_s[number] <= self._clock.now_s]
        for number in done:
            self._end(number, position)

    def _run_eager(self, position: int) -> None:
        while self._ready_eager:
            unit = self._ready_eager.pop(0)
            if unit not in self._ran:
                self._run(unit)
                self._clock.run(self._seconds[unit])
                self._live_nbytes[position:unit] -= self._eager[unit]

    def _end(self, number: int, position: int) -> None:
        pair = self._pairs[number]
        self._stalled_s += self._clock.wait(self._done_s[number])
        self._in_flight.remove(number)
        for last_use, nbytes in pair.kept_alive:
            self._live_nbytes[max(position, last_use + 1) : pair.end] -= nbytes
        self._run(pair.end)

    def _run(self, unit: int) -> None:
        self._order.append(unit)
        self._ran.add(unit)
        for later in self._after[unit]:
            self._missing[later] -= 1
            if self._missing[later]:
                continue
            if later in self._pair_of_start:
                self._ready.append(self._pair_of_start[later])
            elif later in self._eager:
                self._ready_eager.append(later)
