"""Ask several planners and take the best answer."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.planners.protocol import Planner, Problem, Proposal, rank


@dataclass(frozen=True)
class BestPlanner:
    """Never worse than any of its planners; the plan bears the name of the one that made it."""

    planners: tuple[Planner, ...]
    name: str = "best"

    def propose(self, problem: Problem) -> Proposal:
        return min((planner.propose(problem) for planner in self.planners), key=rank)
