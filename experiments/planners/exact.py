"""A planner that proves: the whole problem as one model, cut down by the best plan that a quick search finds."""

from __future__ import annotations

import time

from experiments.planners.bound import lower_bound
from experiments.planners.evict import evict, prune
from experiments.planners.lns import Search
from experiments.planners.model import Effort, Model, every_pair
from experiments.planners.stages import Answer, Pair, Stages, extra_ticks, fits

_SEARCH_SHARE = 0.1  # of the time, before the proof
_MOST_SEARCH_S, _PATIENCE = 4.0, 20


def solve(stages: Stages, seconds: float, runs: int = 1, workers: int = 2) -> Answer:
    """The best plan and its proof, or the best that the time allows and a bound.

    With more than one run, repetitions within a stage may come in more orders, and an item twice.
    """
    until = time.monotonic() + seconds
    bound = lower_bound(stages, _SEARCH_SHARE * seconds, workers)
    if bound.extra_ticks is None:
        return Answer(None, 0, 0, "infeasible", runs, bound.stage, bound.stage_nbytes)
    fine = stages.refined(runs)
    again = _quick(fine, bound.extra_ticks, min(_MOST_SEARCH_S, _SEARCH_SHARE * seconds), workers)
    extra = None if again is None else extra_ticks(fine, again)
    if extra is not None and extra <= bound.extra_ticks:
        return Answer(again, extra, extra, "optimal", runs)
    model = Model(fine, every_pair(fine, extra), (), again or ())
    if extra is not None:
        model.at_most(extra - 1)
    choice = model.solve(Effort(until - time.monotonic(), workers))
    least = max(bound.extra_ticks, choice.bound_ticks)
    if choice.again is not None:
        again = prune(fine, choice.again)
        extra = extra_ticks(fine, again)
        return Answer(again, extra, extra if choice.proven else least, "optimal" if choice.proven else "feasible", runs)
    if again is None or extra is None:
        return Answer(None, 0, least, "infeasible" if choice.proven else "unknown", runs)
    return Answer(again, extra, extra if choice.proven else least, "optimal" if choice.proven else "feasible", runs)


def _quick(stages: Stages, bound_ticks: int, seconds: float, workers: int) -> frozenset[Pair] | None:
    """A plan that fits, if one is found quickly."""
    again = evict(stages)
    if fits(stages, again):
        again = prune(stages, again)
    again = Search(stages, again, bound_ticks, workers, patience=_PATIENCE).run(seconds)
    return again if fits(stages, again) else None
