"""All choices at once, as a mixed-integer program: round its relaxation, then search for better plans nearby.

The better of two plans, the rounded one (`planning/rounding.py`) and one that evicts value by value
(`planning/descent.py`), is improved (`planning/neighbours.py`). The host is used where nothing fits without.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from memplan.planning.layout import Layout
from memplan.planning.neighbours import improve
from memplan.planning.planners.protocol import Problem, Proposal, rank
from memplan.planning.rounding import rounded
from memplan.planning.trial import Trial, Trials


@dataclass(frozen=True)
class MilpPlanner:
    """See the module's text.

    Attributes:
      seconds: after which nothing better is looked for. A first plan is made in any case.
    """

    seconds: float = 9.0
    name: str = "milp"

    def propose(self, problem: Problem) -> Proposal:
        until = time.monotonic() + self.seconds
        layout = problem.layout()
        trials, first = self.first(problem, layout, until)
        return improve(trials, first, until)

    def first(self, problem: Problem, layout: Layout, until: float) -> tuple[Trials, Trial]:
        """A plan to start from, and where to try others: with the host or without."""
        trials = Trials(replace(problem, host_budget_bytes=0), layout, self.name)
        found = min(rounded(trials, until), trials.evicted({}), key=_rank)
        if problem.host_budget_bytes and not found.proposal.fits:
            with_host = Trials(problem, layout, self.name)
            moving = with_host.evicted({})
            if _rank(moving) < _rank(found):
                return with_host, moving
        return trials, found


def _rank(trial: Trial) -> tuple[bool, float, int]:
    return rank(trial.proposal)
