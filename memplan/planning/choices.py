"""All choices of a plan as one mixed-integer program.

For every value and every segment that might want it (`planning/reach.py`) there are three choices: it is held on the
device since the last such segment, it comes back from the host, or it is computed again. Device bytes of a segment are
the sum of what is held across it and a part that does not depend on the choices. The latter, the segment's *rest*, is
what the simulator says of a known plan beyond that sum.

The cost is time: kernels that run again, bytes that elementwise work reads and writes because of a choice, copies. A
copy counts in full, since XLA does not run it beside computation by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from memplan.planning import cost
from memplan.planning.linear import LinearProgram, Solver
from memplan.planning.planners.protocol import Problem
from memplan.planning.reach import Reach
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import Decisions, Demand, Mode

UNITS = 1000  # the budget and the seconds of a step, in the numbers that the solver sees

Key = tuple[int, int]


class Choices:
    """The program, written down: variables by value and number of the segment that might want it."""

    def __init__(self, problem: Problem, reach: Reach, simulator: Simulator):
        self.problem, self.reach, self.simulator = problem, reach, simulator
        self.layout, self.graph, self.device = reach.layout, problem.graph, problem.device
        self.program = LinearProgram()
        self.nbytes_unit = max(1.0, problem.budget_bytes / UNITS)
        self.second = UNITS / (cost.seconds(self.graph, range(len(self.graph.ops)), self.device) or 1.0)
        self.held: dict[Key, int] = {}  # on the device until then, since the last segment that might want it
        self.moved: dict[Key, int] = {}  # on the host since it was first made
        self.again: dict[Key, int] = {}
        self.leaves: dict[int, int] = {}  # values that ever move
        self._sources: dict[int, frozenset[int]] = {}
        self._asking: dict[Key, list[int]] = defaultdict(list)  # recomputations there that want a value
        self._melting: dict[Key, list[int]] = defaultdict(list)  # of these, those that melt into their readers
        self._bytes: list[list[tuple[int, float]]] = [[] for _ in self.layout.segments]
        self._rows: dict[int, int] = {}  # of segments that any choice takes bytes of
        self._write()
        self.solver: Solver = self.program.ready()

    def keep_to(self, rests: Sequence[int]) -> None:
        """Hold the choices to the budget, given the rest of every segment."""
        rooms = [(rests[segment] - self.problem.budget_bytes) / self.nbytes_unit for segment in self._rows]
        self.solver.require(list(self._rows.values()), rooms)

    def decisions(self, values: np.ndarray) -> Decisions:
        """The decisions that a solution stands for."""
        taken = values > 0.5
        decisions = {key: Mode.DROP for key, variable in self.again.items() if taken[variable]}
        moved = {key: Mode.OFFLOAD_NOW for key, variable in self.moved.items() if taken[variable]}
        return {**moved, **decisions}

    def values(self, decisions: Decisions) -> np.ndarray:
        """What decisions make of the choices; 0 for other variables, and for choices that the program leaves out."""
        found = np.zeros(len(self.program.costs))
        demand = Demand.of(self.layout, decisions)
        asked = [self._asked(demand, segment) for segment in range(len(self.layout.segments))]
        for value, times in self.reach.times.items():
            since: list[int] = []
            uses = set(demand.uses.get(value, ()))
            for when in times:
                since.append(when)
                if value in asked[when]:
                    found[_known(value, when, self.again)] = 1
                elif when not in uses:
                    continue
                elif (value, when) in decisions:
                    found[_known(value, when, self.moved)] = 1
                else:
                    found[[variable for time in since for variable in _known(value, time, self.held)]] = 1
                since = []
        return found

    def variables(self) -> dict[int, list[int]]:
        """The choices about each value."""
        found: dict[int, list[int]] = {value: [] for value in self.reach.times}
        for choices in (self.held, self.moved, self.again):
            for (value, _), variable in choices.items():
                found[value].append(variable)
        return found

    def rests(self, decisions: Decisions, peaks: Sequence[int]) -> list[int]:
        """Per segment: its peak under decisions less what they hold; below 0 where not all is there at once."""
        held = [0] * len(self.layout.segments)
        for value, sequence in Demand.of(self.layout, decisions).events(self.layout).items():
            if value not in self.reach.times:
                continue
            nbytes = self.simulator.graph.passing_nbytes(value)
            for segment in self._present(value, sequence, decisions):
                held[segment] += nbytes
        return [peak - nbytes for peak, nbytes in zip(peaks, held, strict=True)]

    def _asked(self, demand: Demand, segment: int) -> set[int]:
        """Values that are computed again there and read, by the segment or by what else is computed again."""
        again = demand.again[segment]
        if not again:
            return set()
        read = self.layout.reads[segment].union(*(self.layout.carriers[op] for op in again))
        return {value for op in again for value in self.graph.ops[op].outputs if value in read}

    def _present(self, value: int, sequence: Sequence[tuple[int, bool]], decisions: Decisions) -> set[int]:
        """Segments in which the program counts a value: as `_hold` does."""
        present: set[int] = set()
        home = self.layout.home[value]
        for (before, _), (segment, is_use) in pairwise(sequence):
            mode = decisions.get((value, segment))
            if is_use and mode is None:
                present.update(range(before, segment + 1))
            elif is_use:
                present.update((home, segment))
            elif self.has_buffer(value, segment):
                present.add(segment)
        if not self.has_choice_at_home(value):
            present.discard(home)
        return present

    def has_choice_at_home(self, value: int) -> bool:
        """Does it need a buffer where it is first made only if it is held afterwards?"""
        melts = self.reach.op_of(value).fusion == "elementwise"
        return melts and value not in self.reach.read_by_kernel[self.layout.home[value]]

    def has_buffer(self, value: int, segment: int) -> bool:
        """Does it need a buffer where it is computed again?"""
        if self.reach.op_of(value).fusion != "elementwise" or value in self.reach.read_by_kernel[segment]:
            return True
        return value in self._kernel_sources(segment)

    def _kernel_sources(self, segment: int) -> frozenset[int]:
        """Values that a kernel reads if it runs again in this segment."""
        known = self._sources.get(segment)
        if known is None:
            reach = self.reach
            again = (
                v for v in reach.wanted[segment] if reach.op_of(v).fusion == "kernel" and reach.may_drop(v, segment)
            )
            known = self._sources[segment] = frozenset(source for v in again for source in reach.sources(v))
        return known

    def _write(self) -> None:
        for value in self.reach.times:
            self._choose(value)
        for value in self.reach.times:
            self._chain(value)
        for value in self.reach.times:
            self._hold(value)
            self._read(value)
        self._limit()

    def _choose(self, value: int) -> None:
        op = self.reach.op_of(value)
        times = self.reach.times[value]
        worth_holding = op.fusion != "elementwise" or any(value in self.layout.reads[when] for when in times)
        written_s = self.graph.nbytes(value) / self.device.memory_bandwidth
        written_s *= self.has_choice_at_home(value)
        copy_s = cost.copy_seconds(self.graph.nbytes(value), self.device)
        for number, when in enumerate(times):
            if worth_holding:
                self.held[value, when] = self.program.choice(0.0 if number else self.second * written_s)
                if self.problem.host_budget_bytes and when > self.layout.home[value] + 1:
                    self.moved[value, when] = self.program.choice(self.second * copy_s)
            if self.reach.may_drop(value, when):
                self.again[value, when] = self.program.choice(self.second * self._again_s(value, when))
        if any((value, when) in self.moved for when in times):
            self.leaves[value] = self.program.share(self.second * (copy_s + written_s))

    def _again_s(self, value: int, segment: int) -> float:
        """Seconds to compute a value again; what it reads is counted by `_read`."""
        op = self.reach.op_of(value)
        if op.fusion in ("kernel", "view"):
            return cost.op_seconds(self.graph, op, self.device)
        written = self.graph.nbytes(value) if self.has_buffer(value, segment) else 0
        return max(written / self.device.memory_bandwidth, 0.2 * op.flops / self.device.vector_flops)

    def _chain(self, value: int) -> None:
        """What is computed again has what it is computed from, and is asked for."""
        melts = self.reach.op_of(value).fusion != "kernel"
        for when in self.reach.times[value]:
            again = self.again.get((value, when))
            if again is None:
                continue
            for source in self.reach.sources(value):
                self.program.implies(again, self._there(source, when))
                self._asking[source, when].append(again)
                if melts:
                    self._melting[source, when].append(again)

    def _there(self, value: int, when: int) -> list[int]:
        """The ways in which a value can be there."""
        return _known(value, when, self.held, self.moved, self.again)

    def _hold(self, value: int) -> None:
        """What is held was there before; each copy takes device bytes for as long as it is there."""
        size = self.simulator.graph.passing_nbytes(value) / self.nbytes_unit
        home, times = self.layout.home[value], self.reach.times[value]
        last = home
        for number, when in enumerate(times):
            held = self.held.get((value, when))
            if held is not None:
                if number:
                    self.program.implies(held, self._there(value, last))
                for segment in range(last + 1, when):
                    self._bytes[segment].append((held, size))
            if value in self.layout.reads[when]:
                self.program.at_least(1, [(variable, 1) for variable in self._there(value, when)])
            for variable in _known(value, when, self.moved):
                self.program.implies(variable, [self.leaves[value]])
            last = when
        if self.has_choice_at_home(value):
            first = _known(value, times[0], self.held)
            self._count(home, size, [*first, *([self.leaves[value]] if value in self.leaves else [])])
        for when, following in zip(times, (*times[1:], None), strict=True):
            present = [variable for variable in self._there(value, when) if self._takes_bytes(value, when, variable)]
            if following is not None:
                present += _known(value, following, self.held)
            self._count(when, size, present)

    def _takes_bytes(self, value: int, segment: int, variable: int) -> bool:
        return variable != self.again.get((value, segment)) or self.has_buffer(value, segment)

    def _count(self, segment: int, size: float, present: list[int]) -> None:
        """A value takes its bytes once, however many choices want it there."""
        if len(present) == 1:
            self._bytes[segment].append((present[0], size))
        elif present:
            there = self.program.share()
            for variable in present:
                self.program.implies(variable, [there])
            self._bytes[segment].append((there, size))

    def _read(self, value: int) -> None:
        """Elementwise work and reductions read what is there from memory, once per segment; kernels do in any case."""
        read_s = self.graph.nbytes(value) / self.device.memory_bandwidth
        for when in self.reach.times[value]:
            if value in self.reach.read_by_kernel[when]:
                continue
            melted = [(self.again[value, when], 1.0)] if (value, when) in self.again else []
            reads = self.program.share(self.second * read_s)
            if value in self.layout.reads[when]:
                self.program.at_least(1, [(reads, 1), *melted])
            for asker in self._melting[value, when]:
                self.program.at_least(0, [(reads, 1), (asker, -1), *melted])

    def _limit(self) -> None:
        """Only what is asked for is computed again; bytes stay within the budgets."""
        for (value, when), again in self.again.items():
            if value not in self.layout.reads[when]:
                self.program.implies(again, self._asking[value, when])
        over = self.program.excess(UNITS)  # a thousandth of the budget above it costs as much as the whole step
        for segment, terms in enumerate(self._bytes):
            if terms:
                row = self.program.at_least(0.0, [(over, 1), *((variable, -size) for variable, size in terms)])
                self._rows[segment] = row
        self.program.at_least(-self.problem.host_budget_bytes / self.nbytes_unit, list(self._on_host()))

    def _on_host(self) -> Iterator[tuple[int, float]]:
        """A value that ever moves is copied out once, and on the host from then on."""
        for value, leaves in self.leaves.items():
            yield leaves, -self.graph.nbytes(value) / self.nbytes_unit


def _known(value: int, when: int, *choices: Mapping[Key, int]) -> list[int]:
    return [found[value, when] for found in choices if (value, when) in found]
