"""A scheduled module -> one whose collectives run beside more of its kernels, within a limit of bytes.

XLA's scheduler and a plan let few collectives be under way at once. Here the links get something to do whenever they
are free: a sum as soon as what it adds is there, a gather just in time for its first reader; and nobody waits for the
end of a collective before it reads what that makes. Kernels keep their order, or feed the links. All devices run the
same module, so all start the collectives in the same order, which may be another one than before.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np

from memplan.planning.legal import pair_ends
from memplan.planning.packing import live_nbytes
from memplan.planning.precedence import precedence
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import runs
from memplan.xla.buffers import problem_of
from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import BLOCKS, Instruction, Module, predecessors, read_module
from memplan.xla.replay import Replay
from memplan.xla.write import write

_HEAVY = frozenset({*BLOCKS, "custom-call", "dot", "convolution"})


class Overlap:
    """Orders of a module's kernels in which the collectives of its entry run beside more of these."""

    def __init__(self, module: Module, on_gpu: bool, clock: Replay) -> None:
        """`clock`: the module's own."""
        self._module, self._clock = module, clock
        self._problem = problem_of(module, on_gpu, joins_pairs=False)
        self._entries = dict[bool, _Entry]()

    def order(self, limit_nbytes: int, feeds_links: bool = False) -> Sequence[int]:
        """Numbers of all kernels in the new order; increasing if none moves.

        Args:
          limit_nbytes: bytes of live temporaries up to which collectives move. What results may take more, since values
            that share a place are counted as they were.
          feeds_links: kernels move, too. What leads to collectives alone, as a weight's gradient does, runs as soon as
            it can, or beside the next sum that others wait for; what stands between two collectives when the first is
            done; what waits for collectives alone, as updates do, behind all other kernels, or where the links are done
            with these if it frees bytes. Nothing moves for a collective that a heavy kernel waits for, such as the
            gather of a parameter.
        """
        if feeds_links not in self._entries:
            self._entries[feeds_links] = _Entry(self._module, self._problem, feeds_links)
        entry = self._entries[feeds_links]
        if not entry.pairs:
            return range(len(self._problem.kernels))
        return entry.kernels(_Simulation(entry, self._clock, limit_nbytes).order())

    def module(self, order: Sequence[int]) -> Module:
        """The module in this order."""
        return read_module(write(self._module, self._problem, runs(order)), self._module)


@dataclass
class _Pair:
    """A collective, by the places of its start and its end among the units."""

    start: int
    end: int
    reader: int  # the first that waits for the end; the count of units if none does
    gathers: bool
    made_nbytes: int  # that are taken from the start on
    held: Sequence[tuple[int, int]]  # (place of the last other use, bytes) of what is live until the end


class _Entry:
    """The units of the entry by their places: kernels, and loops as a whole.

    Attributes:
      before: places that must precede each.
      pairs: the collectives, by start.
      eager: where kernels feed the links, places that run as soon as the collectives that they wait for are done, and
        the bytes that each frees.
    """

    def __init__(self, module: Module, problem: Problem, feeds_links: bool) -> None:
        self.problem, kernels, ops = problem, problem.kernels, module.entry.ops
        self._nbytes = [buffer.nbytes if buffer.role is Role.TEMPORARY else 0 for buffer in problem.buffers]
        self._unit_of = [[number, *problem.blocks_around(number)][-1] for number in range(len(kernels))]
        self._inside = defaultdict[int, list[int]](list)  # loop of the entry -> kernels in it
        for number, unit in enumerate(self._unit_of):
            self._inside[unit] += [number] if number != unit else []
        self._ends = {
            start: end for start, end in pair_ends(problem).items()
            if kernels[start].block is None and is_collective(ops[kernels[start].name].opcode)
        }  # fmt: skip
        units = [number for number, kernel in enumerate(kernels) if kernel.block is None]
        before, last, relays = self._precedence(ops, units), set[int](), set[int]()
        if feeds_links:
            heavy = [unit for unit in units if _is_heavy(ops[kernels[unit].name])]
            gathers = [start for start in self._ends if _is_gather(ops[kernels[start].name])]
            units, last, relays = _feeding_order(before, self._ends, gathers, heavy)
        self.units, self._place = units, {number: at for at, number in enumerate(units)}
        self.names = [kernels[number].name for number in units]
        self.before = [{self._place[one] for one in before[unit]} for unit in units]
        self._used = dict[int, int]()  # buffer -> place of its last use
        for number in problem.with_bodies(units):
            kernel = kernels[number]
            self._used.update(dict.fromkeys((*kernel.reads, *kernel.writes), self._place[self._unit_of[number]]))
        freed_nbytes = {
            unit: self._freed_nbytes(unit) for unit in (last | relays) - {*self._ends, *self._ends.values()}
        }
        self.eager = {
            self._place[unit]: nbytes for unit, nbytes in freed_nbytes.items() if nbytes > 0 or unit in relays
        }
        self.pairs = self._pairs(ops)

    def _precedence(self, ops: Mapping[str, Instruction], units: Sequence[int]) -> Mapping[int, Collection[int]]:
        """Units that must precede each."""
        kernels = self.problem.kernels
        named = {kernels[unit].name: unit for unit in units}
        updates = {unit for name, unit in named.items() if ops[name].opcode == "fusion"}  # or without any effect
        required = precedence(self.problem, free={*self._ends, *self._ends.values(), *updates})
        return {
            unit: required[unit] | {named[one] for one in predecessors(ops[kernels[unit].name]) if one in named}
            for unit in units
        }

    def _freed_nbytes(self, unit: int) -> int:
        reads = self.problem.kernels[unit].reads
        freed = sum(self._nbytes[one] for one in reads if self._used[one] == self._place[unit])
        return freed - self._made_nbytes(unit)

    def _made_nbytes(self, unit: int) -> int:
        """Bytes of what it writes to places of its own."""
        writes, buffers = self.problem.kernels[unit].writes, self.problem.buffers
        return sum(self._nbytes[one] for one in writes if buffers[one].alias_set == one)

    def _pairs(self, ops: Mapping[str, Instruction]) -> Sequence[_Pair]:
        kernels, buffers, place = self.problem.kernels, self.problem.buffers, self._place
        reader = dict[int, int]()  # place -> the first that it must precede
        for at, earlier in enumerate(self.before):
            for one in earlier:
                reader.setdefault(one, at)
        found = []
        for start, end in sorted(self._ends.items(), key=lambda pair: place[pair[0]]):
            kernel = kernels[start]
            written = {buffers[one].alias_set for one in kernel.writes}
            held = [
                (self._used[one], self._nbytes[one]) for one in kernel.reads if buffers[one].alias_set not in written
            ]
            if place[end] not in reader:  # what nobody reads is gone at the end
                held += [(place[end], self._nbytes[one]) for one in kernel.writes]
            found.append(
                _Pair(
                    place[start],
                    place[end],
                    reader.get(place[end], len(self.units)),
                    _is_gather(ops[kernel.name]),
                    self._made_nbytes(start),
                    held,
                )
            )
        return found

    @cached_property
    def live_nbytes(self) -> np.ndarray:
        """Most bytes of live temporaries in each unit, shape (units,)."""
        order = self.problem.with_bodies(self.units)
        live = dict(zip(order, live_nbytes(self.problem, runs(order)), strict=True))
        return np.array([max(live[one] for one in (*self._inside[unit], unit)) for unit in self.units])

    def kernels(self, order: Sequence[int]) -> list[int]:
        """All kernels in an order of places, bodies right before their loops."""
        return self.problem.with_bodies(self.units[at] for at in order)


def _is_gather(op: Instruction) -> bool:
    return op.opcode == "all-gather-start"


def _is_heavy(op: Instruction) -> bool:
    return op.opcode in _HEAVY or (op.opcode.startswith("fusion") and op.attribute("kind") == "kCustom")


def _feeding_order(
    before: Mapping[int, Collection[int]], ends: Mapping[int, int], gathers: Collection[int], heavy: Collection[int]
) -> tuple[Sequence[int], set[int], set[int]]:
    """Units in an order that gives the links work, those that come last, and those between two collectives.

    What heavy kernels wait for keeps its order. What leads to other collectives alone, as a weight's gradient does,
    comes as soon as it can; where heavy kernels wait for sums, beside the next of these. What waits for other
    collectives alone, as updates do, comes last; light kernels that it reads, such as a rate of learning, do not.

    Args:
      before: the units that must precede each.
      ends: of each collective's start.
      gathers: the starts of gathers.
    """
    after, missing = defaultdict[int, list[int]](list), {unit: len(earlier) for unit, earlier in before.items()}
    for unit, earlier in before.items():
        for one in earlier:
            after[one].append(unit)
    awaited = _closure({one for unit in heavy for one in before[unit]}, before)
    free, sums = {*ends} - awaited, {*ends} & awaited - {*gathers}
    leading, behind = _closure(free, before), _closure(free, after)
    last, waiting = behind - leading, _closure(behind - {*ends, *ends.values()}, after)
    beside = leading - awaited - waiting | _closure(last, before) - leading - behind - _closure(heavy, after)
    ready, fillers, order = list[tuple[bool, int]](), list[tuple[bool, int]](), list[int]()
    ahead, under_way = {*sums}, set[int]()
    newly = [unit for unit, count in missing.items() if not count]
    while newly or ready or fillers:
        for unit in newly:
            heapq.heappush(fillers if unit in beside else ready, (unit in last, unit))
        fills = fillers and (under_way or not ahead or not ready or ready[0][0])
        _, unit = heapq.heappop(fillers if fills else ready)
        order.append(unit)
        if unit in ahead:
            ahead.remove(unit)
            under_way.add(ends[unit])
        under_way.discard(unit)
        newly = []
        for one in after[unit]:
            missing[one] -= 1
            if not missing[one]:
                newly.append(one)
    return order, last, leading & waiting


def _closure(units: Iterable[int], beside: Mapping[int, Collection[int]]) -> set[int]:
    """These, and all that these lead to."""
    found, waiting = set[int](), list(units)
    while waiting:
        unit = waiting.pop()
        if unit not in found:
            found.add(unit)
            waiting += beside.get(unit, ())
    return found


class _Simulation:
    """One pass over the kernels, with the clock of the compute stream and that of the links."""

    def __init__(self, entry: _Entry, result: Replay, limit_nbytes: int) -> None:
        self._pairs, self._before, self._limit = entry.pairs, entry.before, limit_nbytes
        self._live = entry.live_nbytes.copy()
        clock = (result.clock[name] for name in entry.names)
        self._seconds = [end - start for start, end in clock]
        self._of_start = {pair.start: number for number, pair in enumerate(self._pairs)}
        self._of_end = {pair.end: number for number, pair in enumerate(self._pairs)}
        for at in (*self._of_start, *self._of_end):
            self._seconds[at] = 0.0
        self._link_s = [result.seconds.get(entry.names[pair.start], 0.0) for pair in self._pairs]
        self._after = defaultdict[int, list[int]](list)
        for at, earlier in enumerate(self._before):
            for one in earlier:
                self._after[one].append(at)
        self._missing = list(map(len, self._before))
        self._now = self._free = self._late = 0.0  # the last: by which kernels are behind their own clock
        self._done: dict[int, float] = {}  # pair that started -> when the links are done with it
        self._ready = [number for number, pair in enumerate(self._pairs) if not self._missing[pair.start]]
        self._open: list[int] = []  # pairs that started and have not ended
        self._eager = entry.eager
        self._may_run: list[int] = []  # units of these
        self._order: list[int] = []
        self._ran: set[int] = set()

    def order(self) -> Sequence[int]:
        """Places in their new order."""
        latest = self._latest_s()
        for at, seconds in enumerate(self._seconds):
            if at in self._of_start or at in self._of_end:
                self._relieve(at)
                continue
            self._end_done(at)
            self._run_eager(at)
            if at in self._ran:
                continue
            self._require(at, at)
            while self._ready and self._free <= self._now + seconds:
                soon = max(self._now, self._free) + seconds - self._late
                wanted = [n for n in self._ready if latest[n] <= soon or not self._pairs[n].gathers]
                wanted.sort(key=lambda number: (latest[number] > soon, latest[number], number))
                first = next((number for number in wanted if self._may_start(number, at)), None)
                if first is None:
                    break
                self._start(first, at)
            self._relieve(at)
            self._run(at)
            self._now += seconds
        for pair in self._pairs:
            self._require_all((pair.end,), len(self._seconds))
        return self._order

    def _latest_s(self) -> Sequence[float]:
        """By pair: when it must start so that nobody waits, on the clock of the kernels alone."""
        clock, free, found = [0.0, *accumulate(self._seconds)], inf, [0.0] * len(self._pairs)
        for number in sorted(range(len(found)), key=lambda one: (self._pairs[one].reader, one), reverse=True):
            found[number] = free = min(clock[self._pairs[number].reader], free) - self._link_s[number]
        return found

    def _may_start(self, number: int, at: int) -> bool:
        """Does what it makes fit in until it was there before?"""
        pair = self._pairs[number]
        return at >= pair.start or self._live[at : pair.start].max() + pair.made_nbytes <= self._limit

    def _require(self, unit: int, at: int) -> None:
        self._require_all(sorted(self._before[unit]), at)

    def _require_all(self, units: Sequence[int], at: int) -> None:
        """Start and end the collectives among these that have not."""
        for one in units:
            if (number := self._of_start.get(one)) is not None and number not in self._done:
                self._require(one, at)
                self._start(number, at)
            elif (number := self._of_end.get(one)) is not None and (number in self._open or number not in self._done):
                self._require_all((self._pairs[number].start,), at)
                self._end(number, at)

    def _relieve(self, at: int) -> None:
        """End those that hold most, as long as more is live than may be."""

        def held(number: int) -> int:
            pair = self._pairs[number]
            return sum(nbytes for last, nbytes in pair.held if last < at) if at >= pair.end else 0

        def freed(number: int) -> int:
            return sum(max(0, self._eager.get(one, 0)) for one in self._after[self._pairs[number].end])

        while holding := [number for number in (*self._open, *self._ready) if held(number) or freed(number)]:
            if self._live[at] + sum(map(held, holding)) <= self._limit:
                return
            most = max(holding, key=lambda number: held(number) + freed(number))
            self._require_all((self._pairs[most].end,), at)
            self._run_eager(at)

    def _start(self, number: int, at: int) -> None:
        pair = self._pairs[number]
        self._ready.remove(number)
        self._live[at : pair.start] += pair.made_nbytes
        self._free = self._done[number] = max(self._now, self._free) + self._link_s[number]
        self._open.append(number)
        self._run(pair.start)

    def _end_done(self, at: int) -> None:
        for number in [one for one in self._open if self._done[one] <= self._now]:
            self._end(number, at)

    def _run_eager(self, at: int) -> None:
        while self._may_run:
            unit = self._may_run.pop(0)
            if unit not in self._ran:
                self._run(unit)
                self._now += self._seconds[unit]
                self._live[at:unit] -= self._eager[unit]

    def _end(self, number: int, at: int) -> None:
        pair, waited_s = self._pairs[number], max(0.0, self._done[number] - self._now)
        self._now += waited_s
        self._late += waited_s
        self._open.remove(number)
        for last, nbytes in pair.held:
            self._live[max(at, last + 1) : pair.end] -= nbytes
        self._run(pair.end)

    def _run(self, unit: int) -> None:
        self._order.append(unit)
        self._ran.add(unit)
        for one in self._after[unit]:
            self._missing[one] -= 1
            if not self._missing[one] and one in self._of_start:
                self._ready.append(self._of_start[one])
            elif not self._missing[one] and one in self._eager:
                self._may_run.append(one)
