"""Decisions tried out: what the simulator says of the plan they become."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.descent import Descent
from memplan.planning.layout import Layout
from memplan.planning.plan import Plan
from memplan.planning.planners.protocol import Problem, Proposal
from memplan.planning.simulate import Simulator
from memplan.planning.unfold import Decisions, unfold

_LEAST_SHARE = 2e-4  # values smaller than this share of the budget are kept


@dataclass(frozen=True)
class Trial:
    """Decisions, what the simulator says of them, and the peak of every segment of the layout."""

    decisions: Decisions
    proposal: Proposal
    peaks: tuple[int, ...]


@dataclass
class Trials:
    """Tries decisions about one problem.

    Attributes:
      name: of the planner, for its plans.
    """

    problem: Problem
    layout: Layout
    name: str

    def __post_init__(self) -> None:
        self.simulator = Simulator(self.problem.graph, self.problem.device, self.problem.slack)

    @property
    def least_nbytes(self) -> int:
        return max(1, int(self.problem.budget_bytes * _LEAST_SHARE))

    def of(self, decisions: Decisions) -> Trial:
        problem = self.problem
        actions, origins = unfold(self.layout, decisions)
        plan = Plan(actions, problem.graph.fingerprint, self.name, problem.device.name)
        timeline = self.simulator.run(plan)
        peaks = [0] * len(self.layout.segments)
        for origin, moment in zip(origins, timeline.moments, strict=True):
            peaks[origin] = max(peaks[origin], moment.device_nbytes)
        return Trial(decisions, Proposal(plan, timeline, problem.is_kept_by(timeline)), tuple(peaks))

    def evicted(self, decisions: Decisions) -> Trial:
        """With more evictions, until it fits or nothing helps."""
        descent = Descent(self.problem, self.layout, self.name, dict(decisions))
        descent.descend()
        return self.of(descent.decisions)
