"""Evict until it fits, then search for better plans nearby (`planning/neighbours.py`) until time is over.

The host is looked at where evicting to it does better than evicting without: on most links a copy takes longer than
computing a value again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from memplan.planning.descent import Descent
from memplan.planning.neighbours import Search
from memplan.planning.order import early_loose_ends
from memplan.planning.planners.protocol import Problem, Proposal, fence_nbytes, rank
from memplan.planning.unfold import cut


@dataclass(frozen=True)
class MilpPlanner:
    """See the module's text.

    Attributes:
      seconds: when to stop looking for something better, however long the first plan took.
    """

    seconds: float = 10.0
    name: str = "milp"

    def propose(self, problem: Problem) -> Proposal:
        until = time.monotonic() + self.seconds
        layout = cut(problem.graph, early_loose_ends(problem.graph), fence_nbytes(problem.budget_bytes))
        alone = replace(problem, host_budget_bytes=0)
        problems = (alone, problem) if problem.host_budget_bytes else (alone,)
        descents = [Descent(one, layout, self.name) for one in problems]
        proposal, best = min(((d.descend(), d) for d in descents), key=lambda found: rank(found[0]))
        found = Search(best.problem, layout, self.name, until).improve(best.decisions).proposal
        return min(proposal, found, key=rank)
