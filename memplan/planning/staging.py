"""A step as stages and back: a layout's segments, the bytes that the simulator sees in them, and decisions.

The model of stages adds up bytes; the simulator melts and shares. What it sees beyond the sum is put into each stage's
working bytes, first for keeping everything, then for the plan found last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from memplan.planning import cost
from memplan.planning.layout import Layout
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Problem, Proposal, rank
from memplan.planning.simulate import Simulator, Timeline
from memplan.planning.stages import Answer, Pair, Stages, replay
from memplan.planning.unfold import Decisions, Mode, unfold

_TICKS = 200_000  # in a step with everything kept
_LEAST_SHARE = 2e-4  # values smaller than this share of the budget are kept

Solve = Callable[[Stages, float], Answer]


@dataclass
class Staging:
    """One problem, one layout.

    Attributes:
      name: of the planner, for its plans.
    """

    problem: Problem
    layout: Layout
    name: str

    def __post_init__(self) -> None:
        problem, graph = self.problem, self.problem.graph
        self.simulator = Simulator(graph, problem.device, problem.slack)
        least = max(1, int(problem.budget_bytes * _LEAST_SHARE))
        home = self.layout.home
        place = {op: number for number, op in enumerate(op for ops in self.layout.segments for op in ops)}
        values = [v for v in home if self.simulator.graph.passing_nbytes(v) >= least and v not in self.layout.returned]
        self.values = sorted(values, key=lambda value: (place[self._maker(value)], value))
        self.item = {value: number for number, value in enumerate(self.values)}

    def _maker(self, value: int) -> int:
        made = self.problem.graph.producer[value]
        assert made is not None, "arguments are no items"
        return made

    def plan(self, decisions: Decisions) -> tuple[Proposal, np.ndarray, list[float]]:
        """A proposal, the largest bytes of each segment of the layout, and their seconds."""
        problem = self.problem
        actions, origins = unfold(self.layout, decisions)
        plan = Plan(actions, problem.graph.fingerprint, self.name, problem.device.name)
        timeline: Timeline = self.simulator.run(plan)
        peaks = np.zeros(len(self.layout.segments), dtype=np.int64)
        seconds = [0.0] * len(self.layout.segments)
        for origin, moment in zip(origins, timeline.moments, strict=True):
            peaks[origin] = max(peaks[origin], moment.device_nbytes)
            seconds[origin] += moment.end_s - moment.start_s - moment.stall_s
        fits = problem.is_kept_by(timeline)
        return Proposal(plan, timeline, fits), peaks, seconds

    def stages(self, seconds: list[float]) -> Stages:
        """The problem before any correction: items alone, no working bytes."""
        problem, graph, layout = self.problem, self.problem.graph, self.layout
        tick_s = max(sum(seconds), 1e-9) / _TICKS
        uses: list[list[int]] = [[] for _ in self.values]
        for number, read in enumerate(layout.reads):
            for value in read:
                if value in self.item:
                    uses[self.item[value]].append(number)
        makers = [graph.ops[self._maker(value)] for value in self.values]
        carried = [layout.carriers[self._maker(value)] for value in self.values]
        again = [cost.op_seconds(graph, op, problem.device) for op in makers]
        copies = [cost.copy_seconds(graph.nbytes(value), problem.device) for value in self.values]
        return Stages(
            nbytes=tuple(map(self.simulator.graph.passing_nbytes, self.values)),
            ticks=tuple(
                max(1, round(s / tick_s)) if op.recomputable else None for s, op in zip(again, makers, strict=True)
            ),
            inputs=tuple(tuple(sorted(self.item[v] for v in sources if v in self.item)) for sources in carried),
            home=tuple(layout.home[value] for value in self.values),
            uses=tuple(map(tuple, uses)),
            working_nbytes=(0,) * len(layout.segments),
            own_ticks=tuple(round(s / tick_s) for s in seconds),
            budget_bytes=problem.budget_bytes,
            host_budget_bytes=problem.host_budget_bytes,
            copy_ticks=tuple(max(1, round(s / tick_s)) for s in copies),
            tick_s=tick_s,
            late=True,
        )

    def decisions(self, again: Collection[Pair], moved: Collection[Pair]) -> Decisions:
        """Repetitions and moves, by value."""
        found = {(self.values[item], stage): Mode.DROP for item, stage in again}
        found.update({(self.values[item], stage): Mode.OFFLOAD for item, stage in moved})
        return found

    def search(self, solve: Solve, seconds: float, rounds: int) -> Proposal:
        """Solve, simulate, correct the working bytes, and solve again: the best proposal of all rounds."""
        until = time.monotonic() + seconds
        best, peaks, own_s = self.plan({})
        stages = self.stages(own_s)
        answer = Answer(frozenset(), 0, 0, "feasible")
        for number in range(rounds):
            if best.fits and number == 0:
                return best
            assert answer.again is not None
            stages = _corrected(stages, answer, peaks)
            answer = solve(stages, (until - time.monotonic()) / (rounds - number))
            if answer.again is None:
                break
            proposal, peaks, _ = self.plan(self.decisions(answer.again, answer.moved))
            best = min(best, proposal, key=rank)
            if proposal.fits and answer.status == "optimal":
                break
        return best


def _corrected(stages: Stages, answer: Answer, peaks: np.ndarray) -> Stages:
    """Working bytes such that the sum says what the simulator says of this answer."""
    assert answer.again is not None
    modelled = np.zeros(stages.count, dtype=np.int64)
    played = replay(stages, answer.again, answer.moved)
    for (stage, _), nbytes in zip(played.steps, played.step_nbytes, strict=True):
        modelled[stage] = max(modelled[stage], nbytes)
    working = np.array(stages.working_nbytes, dtype=np.int64) + peaks - modelled
    return replace(stages, working_nbytes=tuple(working.tolist()))
