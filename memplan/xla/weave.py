"""A scheduled module -> one whose asynchronous collectives run beside its kernels, by the clock of the replay.

XLA's scheduler guesses what a collective takes, and leaves many without a kernel beside them. Here a collective that no
heavy kernel waits for starts as soon as what it reads is there, and is waited for at the first kernel after the links
are done with it; what waits for such collectives alone, as updates do, comes behind all other kernels. All devices run
the same module, so the collectives of all stay in one order.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from memplan.hardware.device import Device
from memplan.hardware.machine import Machine
from memplan.planning.legal import pair_ends
from memplan.planning.precedence import precedence
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.xla.buffers import problem_of
from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import BLOCKS, Instruction, Module, predecessors, read_module
from memplan.xla.replay import Replay, replay
from memplan.xla.write import write

_HEAVY = frozenset({*BLOCKS, "custom-call", "dot", "convolution"})
_LEAST_GAIN = 1e-6  # of a step: below, nothing is gained


def weave(module: Module, device: Device, machine: Machine) -> Module:
    """The module with the collectives of its entry among the kernels; itself where the replay gains nothing."""
    if not any(_starts(op) for op in module.entry.ops.values()):
        return module
    before = replay(module, device, machine)
    weaver = _Weaver(module, problem_of(module, device.target is not None, joins_pairs=False), before)
    if not weaver.free:
        return module
    woven = read_module(write(module, weaver.problem, runs(weaver.order())), module)
    gained_s = before.step_s - replay(woven, device, machine).step_s
    return woven if gained_s > _LEAST_GAIN * before.step_s else module


def _starts(op: Instruction) -> bool:
    return op.opcode.endswith("-start") and is_collective(op.opcode)


def _is_heavy(op: Instruction) -> bool:
    return op.opcode in _HEAVY or (op.opcode.startswith("fusion") and op.attribute("kind") == "kCustom")


class _Clock:
    """The compute stream, and the links, which serve one collective at a time."""

    def __init__(self) -> None:
        self._now = self._free = 0.0
        self._done: dict[int, float] = {}  # end of a pair -> when the links are done with it

    def send(self, end: int, seconds: float) -> None:
        self._free = max(self._now, self._free) + seconds
        self._done[end] = self._free

    def wait(self, end: int) -> None:
        self._now = max(self._now, self._done[end])

    def run(self, seconds: float) -> None:
        self._now += seconds

    def is_done(self, end: int) -> bool:
        return self._done[end] <= self._now


class _Weaver:
    """An order of the entry's kernels, loops as a whole.

    Attributes:
      free: starts of the collectives that are moved.
    """

    def __init__(self, module: Module, problem: Problem, before: Replay) -> None:
        self.problem, self._replay = problem, before
        self._ops = module.entry.ops
        kernels = problem.kernels
        self._units = [number for number, kernel in enumerate(kernels) if kernel.parent_loop is None]
        self._number = {kernels[number].name: number for number in self._units}
        self._end = pair_ends(problem)
        starts = {number for number in self._units if _starts(self._op(number))}
        self._links = starts | {self._end[number] for number in starts}
        self._before = self._edges(precedence(problem, free=self._links))
        self._after: dict[int, list[int]] = defaultdict(list)
        for unit in self._units:
            for one in self._before[unit]:
                self._after[one].append(unit)
        self.free = starts - self._leading_to(unit for unit in self._units if _is_heavy(self._op(unit)))

    def _op(self, number: int) -> Instruction:
        return self._ops[self.problem.kernels[number].name]

    def _edges(self, before: Mapping[int, set[int]]) -> Mapping[int, set[int]]:
        """With XLA's own demands for an order."""
        found = {}
        for unit in self._units:
            more = (self._number.get(name) for name in predecessors(self._op(unit)))
            found[unit] = before[unit] | {one for one in more if one is not None}
        return found

    def _leading_to(self, units: Iterable[int]) -> set[int]:
        """These, and all that must precede them."""
        return _closure(units, self._before)

    @cached_property
    def _rank(self) -> Mapping[int, int]:
        """0 for what the links wait for, 1 for other kernels, 2 for those that wait for moved collectives alone."""
        behind = _closure(self.free, self._after)
        leading = self._leading_to(self.free)
        return {unit: (0 if unit in leading else 2) if unit in behind else 1 for unit in self._units}

    def order(self) -> Sequence[int]:
        """All kernels, bodies right before their loops."""
        return self.problem.with_bodies(self._ordered())

    def _ordered(self) -> Sequence[int]:
        """Units by rank, then as they were; ends of moved collectives by the clock."""
        clock, free, missing = _Clock(), self.free, {unit: len(self._before[unit]) for unit in self._units}
        ends = {self._end[start] for start in free}
        ready = [(self._rank[unit], unit) for unit in self._units if not missing[unit]]
        heapq.heapify(ready)
        under_way, order = deque[int](), list[int]()
        while ready or under_way:
            if under_way and (not ready or clock.is_done(under_way[0])):
                unit = under_way.popleft()
            else:
                _, unit = heapq.heappop(ready)
            order.append(unit)
            self._advance(clock, unit)
            for one in self._after[unit]:
                missing[one] -= 1
                if not missing[one] and one in ends:
                    under_way.append(one)
                elif not missing[one]:
                    heapq.heappush(ready, (self._rank[one], one))
        return order

    def _advance(self, clock: _Clock, unit: int) -> None:
        op = self._op(unit)
        if unit in self._links and unit in self._end:
            clock.send(self._end[unit], self._replay.seconds.get(op.name, 0.0))
        elif unit in self._links:
            clock.wait(unit)
        else:
            start, end = self._replay.clock[op.name]
            clock.run(end - start)


def _closure(units: Iterable[int], beside: Mapping[int, Collection[int]]) -> set[int]:
    """These, and all that these lead to."""
    found, waiting = set[int](), list(units)
    while waiting:
        unit = waiting.pop()
        if unit not in found:
            found.add(unit)
            waiting += beside.get(unit, ())
    return found
