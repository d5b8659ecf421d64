"""Choose everything at once: a mixed-integer program over all values and all segments that might want them.

For every value and every segment that might want it (`planning/reach.py`) there are three choices: it is held on the
device since the last such segment, it comes back from the host, or it is computed again. Device bytes of a segment are
the sum of what is held across it and a part that does not depend on the choices. The latter is what the simulator says
beyond that sum; it is taken from the last solution and the program solved again, until the simulator agrees. Where no
solution fits, the nearest one is evicted from (`planning/descent.py`).

The cost is time: kernels that run again, bytes that elementwise work reads and writes because of a choice, copies. A
copy counts in full, since XLA does not run it beside computation by itself. The relaxation is tight (the bound is
usually within a percent at the root), which the same model in clauses is not.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from memplan.planning import cost
from memplan.planning.descent import Descent
from memplan.planning.linear import LinearProgram
from memplan.planning.order import early_loose_ends
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Problem, Proposal, fence_nbytes, rank
from memplan.planning.reach import Reach
from memplan.planning.simulate import Simulator, Timeline
from memplan.planning.unfold import Decisions, Demand, Layout, Mode, cut, unfold

_ROUNDS = 5
_LEAST_SHARE = 2e-4  # values smaller than this share of the budget are kept
_WIDER = ((1, 8, False), (2, 10, False), (2, 10, True), (6, 60, True))  # kernels and operations of a chain; host?
_ROUGH, _GAP = 0.05, 0.01  # how near to the least the first solution has to be, and later ones
_UNITS = 1000  # the budget and the seconds of a step, in the numbers that the solver sees

Key = tuple[int, int]


@dataclass(frozen=True)
class MilpPlanner:
    """See the module's text.

    Attributes:
      seconds: when to stop looking for something better.
    """

    seconds: float = 12.0
    name: str = "milp"

    def propose(self, problem: Problem) -> Proposal:
        layout = cut(problem.graph, early_loose_ends(problem.graph), fence_nbytes(problem.budget_bytes))
        least = max(1, int(problem.budget_bytes * _LEAST_SHARE))
        until = time.monotonic() + self.seconds
        decisions: Decisions = {}
        found: list[Proposal] = []
        for kernels, operations, with_host in _WIDER:
            allowed = problem if with_host else replace(problem, host_budget_bytes=0)
            model = _Model(allowed, Reach(layout, least, kernels, operations))
            best = model.refine(decisions, until)
            found.append(best.proposal)
            if best.proposal.fits:
                return best.proposal
            decisions = best.decisions
        return min([*found, Descent(problem, layout, self.name, dict(decisions)).descend()], key=rank)


@dataclass(frozen=True)
class _Replay:
    """Decisions, what the simulator says of them, and the peak of every segment of the layout."""

    decisions: Decisions
    proposal: Proposal
    peaks: tuple[int, ...]


@dataclass
class _Model:
    problem: Problem
    reach: Reach
    _sources: dict[int, frozenset[int]] = field(default_factory=dict)
    _last: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.layout: Layout = self.reach.layout
        self.simulator = Simulator(self.problem.graph, self.problem.device, self.problem.slack)

    def refine(self, decisions: Decisions, until: float) -> _Replay:
        """Solve, ask the simulator, solve again, until it agrees that all fits or time is over."""
        latest = self.replay(decisions)
        best, fixed = latest, self.fixed_nbytes(latest)
        for number in range(_ROUNDS):
            left = until - time.monotonic()
            chosen = self.solve(fixed, left, _ROUGH if not number else _GAP) if left > 0 else None
            if chosen is None or chosen == latest.decisions:
                break
            latest = self.replay(chosen)
            best = min(best, latest, key=lambda one: rank(one.proposal))
            if number and latest.proposal.fits:
                break
            seen = self.fixed_nbytes(latest)
            over = [peak > self.problem.budget_bytes for peak in latest.peaks]
            fixed = [new if is_over or not number else old for old, new, is_over in zip(fixed, seen, over, strict=True)]
        return best

    def replay(self, decisions: Decisions) -> _Replay:
        problem = self.problem
        actions, origins = unfold(self.layout, decisions)
        plan = Plan(actions, problem.graph.fingerprint, MilpPlanner.name, problem.device.name)
        timeline: Timeline = self.simulator.run(plan)
        peaks = [0] * len(self.layout.segments)
        for origin, moment in zip(origins, timeline.moments, strict=True):
            peaks[origin] = max(peaks[origin], moment.device_nbytes)
        return _Replay(decisions, Proposal(plan, timeline, problem.is_kept_by(timeline)), tuple(peaks))

    def fixed_nbytes(self, replay: _Replay) -> list[int]:
        """Per segment: its peak less the sum of what is held by choice; below 0 where not all is there at once."""
        held = [0] * len(self.layout.segments)
        for value, sequence in Demand.of(self.layout, replay.decisions).events(self.layout).items():
            if value not in self.reach.times:
                continue
            nbytes = self.simulator.size(value)
            for segment in self._present(value, sequence, replay.decisions):
                held[segment] += nbytes
        return [peak - nbytes for peak, nbytes in zip(replay.peaks, held, strict=True)]

    def _present(self, value: int, sequence: Sequence[tuple[int, bool]], decisions: Decisions) -> set[int]:
        """Segments in which the program counts a value: as `_Writing.hold` does."""
        present: set[int] = set()
        for (before, _), (segment, is_use) in pairwise(sequence):
            mode = decisions.get((value, segment))
            if is_use and mode is None:
                present.update(range(before, segment + 1))
            elif is_use:
                present.update((before, segment))
            elif self.has_buffer(value, segment):
                present.add(segment)
        if not self.has_choice_at_home(value):
            present.discard(self.layout.home[value])
        return present

    def has_choice_at_home(self, value: int) -> bool:
        """Does it need a buffer where it is first made only if it is held afterwards?"""
        melts = self.reach.op_of(value).fusion == "elementwise"
        return melts and value not in self.reach.read_by_kernel[self.layout.home[value]]

    def has_buffer(self, value: int, segment: int) -> bool:
        """Does it need a buffer where it is computed again?"""
        if self.reach.op_of(value).fusion != "elementwise" or value in self.reach.read_by_kernel[segment]:
            return True
        return value in self.kernel_sources(segment)

    def kernel_sources(self, segment: int) -> frozenset[int]:
        """Values that a kernel reads if it runs again in this segment."""
        known = self._sources.get(segment)
        if known is None:
            reach = self.reach
            again = (
                v for v in reach.wanted[segment] if reach.op_of(v).fusion == "kernel" and reach.may_drop(v, segment)
            )
            known = self._sources[segment] = frozenset(source for v in again for source in reach.sources(v))
        return known

    def solve(self, fixed: Sequence[int], seconds: float, gap: float) -> Decisions | None:
        """From the last solution, whose variables are the same: only the bytes that are left to choices differ."""
        writing = _Writing(self, fixed)
        writing.write()
        solution = writing.program.solve(seconds, gap, self._last)
        self._last = solution.values
        return None if solution.values is None else writing.decisions(solution.values)


@dataclass
class _Writing:
    """The program, written down: variables by value and number of the segment that might want it."""

    model: _Model
    fixed: Sequence[int]

    def __post_init__(self) -> None:
        self.reach, self.layout, self.problem = self.model.reach, self.model.layout, self.model.problem
        self.graph, self.device = self.problem.graph, self.problem.device
        self.program = LinearProgram()
        self.nbytes_unit = max(1.0, self.problem.budget_bytes / _UNITS)
        self.second = _UNITS / (cost.seconds(self.graph, range(len(self.graph.ops)), self.device) or 1.0)
        self.held: dict[Key, int] = {}  # on the device until then, since the last segment that might want it
        self.moved: dict[Key, int] = {}  # on the host meanwhile
        self.again: dict[Key, int] = {}
        self.asking: dict[Key, list[int]] = defaultdict(list)  # recomputations there that want a value
        self.melting: dict[Key, list[int]] = defaultdict(list)  # of these, those that melt into their readers
        self.bytes: list[list[tuple[int, float]]] = [[] for _ in self.layout.segments]

    def write(self) -> None:
        for value in self.reach.times:
            self.choices(value)
        for value in self.reach.times:
            self.chains(value)
        for value in self.reach.times:
            self.hold(value)
            self.read(value)
        self.limits()

    def decisions(self, values: np.ndarray) -> Decisions:
        taken = values > 0.5
        decisions = {key: Mode.DROP for key, variable in self.again.items() if taken[variable]}
        moved = {key: Mode.OFFLOAD_NOW for key, variable in self.moved.items() if taken[variable]}
        return {**moved, **decisions}

    def choices(self, value: int) -> None:
        op = self.reach.op_of(value)
        times = self.reach.times[value]
        worth_holding = op.fusion != "elementwise" or any(value in self.layout.reads[when] for when in times)
        written_s = self.graph.nbytes(value) / self.device.memory_bandwidth
        copy_s = cost.copy_seconds(self.graph.nbytes(value), self.device)
        last = self.layout.home[value]
        for number, when in enumerate(times):
            if worth_holding:
                leaves = number == 0 and self.model.has_choice_at_home(value)
                self.held[value, when] = self.program.choice(self.second * written_s if leaves else 0.0)
                if self.problem.host_budget_bytes and when > last + 1:
                    self.moved[value, when] = self.program.choice(
                        self.second * (copy_s + (written_s if leaves else 0.0))
                    )
            if self.reach.may_drop(value, when):
                self.again[value, when] = self.program.choice(self.second * self.again_s(value, when))
            last = when

    def again_s(self, value: int, segment: int) -> float:
        """Seconds to compute a value again; what it reads is counted by `read`."""
        op = self.reach.op_of(value)
        if op.fusion in ("kernel", "view"):
            return cost.op_seconds(self.graph, op, self.device)
        written = self.graph.nbytes(value) if self.model.has_buffer(value, segment) else 0
        return max(written / self.device.memory_bandwidth, 0.2 * op.flops / self.device.vector_flops)

    def chains(self, value: int) -> None:
        """What is computed again has what it is computed from, and is asked for."""
        melts = self.reach.op_of(value).fusion != "kernel"
        for when in self.reach.times[value]:
            again = self.again.get((value, when))
            if again is None:
                continue
            for source in self.reach.sources(value):
                self.program.implies(again, self.there(source, when))
                self.asking[source, when].append(again)
                if melts:
                    self.melting[source, when].append(again)

    def there(self, value: int, when: int) -> list[int]:
        """The ways in which a value can be there."""
        return [found[value, when] for found in (self.held, self.moved, self.again) if (value, when) in found]

    def hold(self, value: int) -> None:
        """Copies come from earlier ones; each takes device bytes for as long as it is there."""
        size = self.model.simulator.size(value) / self.nbytes_unit
        home, times = self.layout.home[value], self.reach.times[value]
        before: list[int] | None = None
        last = home
        for when in times:
            kept = [found[value, when] for found in (self.held, self.moved) if (value, when) in found]
            if before is not None:
                for variable in kept:
                    self.program.implies(variable, before)
            if value in self.layout.reads[when]:
                self.program.at_least(1, [(variable, 1) for variable in self.there(value, when)])
            held = self.held.get((value, when))
            if held is not None:
                for segment in range(last + 1, when):
                    self.bytes[segment].append((held, size))
            before, last = self.there(value, when), when
        for segment, following in zip((home, *times), (*times, None), strict=True):
            present = (
                []
                if segment == home
                else [v for v in self.there(value, segment) if self.takes_bytes(value, segment, v)]
            )
            if following is not None and (segment != home or self.model.has_choice_at_home(value)):
                present += [found[value, following] for found in (self.held, self.moved) if (value, following) in found]
            self.count(segment, size, present)

    def takes_bytes(self, value: int, segment: int, variable: int) -> bool:
        return variable != self.again.get((value, segment)) or self.model.has_buffer(value, segment)

    def count(self, segment: int, size: float, present: list[int]) -> None:
        """A value takes its bytes once, however many choices want it there."""
        if len(present) == 1:
            self.bytes[segment].append((present[0], size))
        elif present:
            there = self.program.share()
            for variable in present:
                self.program.implies(variable, [there])
            self.bytes[segment].append((there, size))

    def read(self, value: int) -> None:
        """Elementwise work and reductions read what is there from memory, once per segment; kernels do in any case."""
        read_s = self.graph.nbytes(value) / self.device.memory_bandwidth
        for when in self.reach.times[value]:
            if value in self.reach.read_by_kernel[when]:
                continue
            melted = [(self.again[value, when], 1.0)] if (value, when) in self.again else []
            reads = self.program.share(self.second * read_s)
            if value in self.layout.reads[when]:
                self.program.at_least(1, [(reads, 1), *melted])
            for asker in self.melting[value, when]:
                self.program.at_least(0, [(reads, 1), (asker, -1), *melted])

    def limits(self) -> None:
        """Only what is asked for is computed again; bytes stay within the budgets."""
        for (value, when), again in self.again.items():
            if value not in self.layout.reads[when]:
                self.program.implies(again, self.asking[value, when])
        over = self.program.excess(_UNITS)  # a thousandth of the budget above it costs as much as the whole step
        for segment, terms in enumerate(self.bytes):
            if terms:
                room = (self.problem.budget_bytes - self.fixed[segment]) / self.nbytes_unit
                self.program.at_least(-room, [(over, 1), *((variable, -size) for variable, size in terms)])
        self.program.at_least(-self.problem.host_budget_bytes / self.nbytes_unit, list(self.on_host()))

    def on_host(self) -> Iterator[tuple[int, float]]:
        """A value that ever moves is copied out once, and on the host from then on."""
        by_value: dict[int, list[int]] = defaultdict(list)
        for (value, _), variable in self.moved.items():
            by_value[value].append(variable)
        for value, variables in by_value.items():
            nbytes = self.graph.nbytes(value)
            leaves = self.program.share(self.second * cost.copy_seconds(nbytes, self.device))
            for variable in variables:
                self.program.implies(variable, [leaves])
            yield leaves, -nbytes / self.nbytes_unit
