"""Evict until it fits (`planning/descent.py`): fast, and the same whatever the machine's load is."""

from __future__ import annotations

from dataclasses import replace

from memplan.planning.descent import Descent
from memplan.planning.planners.protocol import Problem, Proposal, rank


class GreedyPlanner:
    """Plans with and without the host, since a slow link can cost more than it frees."""

    name = "greedy"

    def propose(self, problem: Problem) -> Proposal:
        layout = problem.layout()
        alone = Descent(replace(problem, host_budget_bytes=0), layout, self.name).descend()
        if not problem.host_budget_bytes:
            return alone
        return min(alone, Descent(problem, layout, self.name).descend(), key=rank)
