"""A first plan from the relaxation of all choices at once.

The program of `planning/choices.py` without its integrality is solved in a moment, and most choices come out whole.
Those are held; what is left is small enough to be solved as it is (RENS: Berthold, Mathematical Programming
Computation 6, 2014). What the simulator finds over the budget is evicted one by one, and is known in the next round.
"""

from __future__ import annotations

import time

import numpy as np

from memplan.planning.choices import UNITS, Choices
from memplan.planning.planners.protocol import rank
from memplan.planning.reach import Reach
from memplan.planning.trial import Trial, Trials

_KERNELS, _OPERATIONS = 1, 8  # of a chain of recomputations
_ROUNDS = 3
_SECONDS, _GAP = 4.0, 0.002  # for what is left
_NEAR = 0.005 * UNITS  # of the relaxation, where nothing is left to gain


def rounded(trials: Trials, until: float) -> Trial:
    """The best plan of a few rounds, within the budget or not; the first round is made whatever the time is."""
    best = latest = trials.of({})
    if best.proposal.fits:
        return best
    reach = Reach(trials.layout, trials.least_nbytes, _KERNELS, _OPERATIONS)
    choices = Choices(trials.problem, reach, trials.simulator)
    for number in range(_ROUNDS):
        if number and time.monotonic() > until:
            break
        choices.keep_to(choices.rests(latest.decisions, latest.peaks))
        relaxed = choices.solver.relax()
        if relaxed.values is None:
            break
        left = np.abs(relaxed.values - np.round(relaxed.values)) > 1e-6
        solution = choices.solver.solve(_SECONDS, _GAP, relaxed.values, left)
        if solution.values is None:
            break
        latest = trials.of(choices.decisions(solution.values))
        found = latest if latest.proposal.fits else trials.evicted(latest.decisions)
        best = min(best, found, key=lambda trial: rank(trial.proposal))
        lost_s = best.proposal.timeline.compute_s - latest.proposal.timeline.compute_s
        if best.proposal.fits and solution.cost - relaxed.cost + lost_s * choices.second < _NEAR:
            break
    return best
