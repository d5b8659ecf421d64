"""A planner that proves: the whole problem as one model, cut down by the best plan that a quick search finds."""

from __future__ import annotations

import time

from experiments.planners.bound import lower_bound
from experiments.planners.evict import evict, prune
from experiments.planners.lns import NeighbourhoodSearch
from experiments.planners.model import Effort, Model, all_recomputations
from experiments.planners.stages import Answer, Recomputation, Stages, extra_ticks, fits

_SEARCH_SHARE = 0.1  # of the time, before the proof
_MOST_SEARCH_S, _PATIENCE = 4.0, 20


def solve(stages: Stages, seconds: float, runs: int = 1, workers: int = 2) -> Answer:
    """The best plan and its proof, or the best that the time allows and a bound.

    With more than one run, recomputations within a stage may come in more orders, and an item twice.
    """
    until = time.monotonic() + seconds
    bound = lower_bound(stages, _SEARCH_SHARE * seconds, workers)
    if bound.extra_ticks is None:
        return Answer(None, 0, 0, "infeasible", runs, bound.stage, bound.stage_nbytes)
    fine = stages.refine(runs)
    recomputed = _quick(fine, bound.extra_ticks, min(_MOST_SEARCH_S, _SEARCH_SHARE * seconds), workers)
    extra = None if recomputed is None else extra_ticks(fine, recomputed)
    if extra is not None and extra <= bound.extra_ticks:
        return Answer(recomputed, extra, extra, "optimal", runs)
    model = Model(fine, all_recomputations(fine, extra), (), recomputed or ())
    if extra is not None:
        model.at_most(extra - 1)
    choice = model.solve(Effort(until - time.monotonic(), workers))
    least = max(bound.extra_ticks, choice.bound_ticks)
    if choice.recomputed is not None:
        recomputed = prune(fine, choice.recomputed)
        extra = extra_ticks(fine, recomputed)
    if recomputed is None or extra is None:
        return Answer(None, 0, least, "infeasible" if choice.proven else "unknown", runs)
    if choice.proven:
        return Answer(recomputed, extra, extra, "optimal", runs)
    return Answer(recomputed, extra, least, "feasible", runs)


def _quick(stages: Stages, bound_ticks: int, seconds: float, workers: int) -> frozenset[Recomputation] | None:
    """A plan that fits, if one is found quickly."""
    recomputed = evict(stages)
    if fits(stages, recomputed):
        recomputed = prune(stages, recomputed)
    recomputed = NeighbourhoodSearch(stages, recomputed, bound_ticks, workers, patience=_PATIENCE).run(seconds)
    return recomputed if fits(stages, recomputed) else None
