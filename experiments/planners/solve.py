"""Plans for stages: memplan's own eviction first, then CP-SAT, which improves what that found and may prove it."""

import time

from experiments.planners.bound import lower_bound
from experiments.planners.evict import evict, prune
from experiments.planners.lns import NeighbourhoodSearch
from experiments.planners.model import Model, all_recomputations
from experiments.planners.stages import Answer, Stages, extra_ticks, fits

_MOST_ROUND_S = 3.0  # for one neighbourhood
_MOST_SEARCH_S, _PATIENCE = 4.0, 20  # before a proof


def solve(stages: Stages, seconds: float, prove: bool = True, runs: int = 1, workers: int = 2) -> Answer:
    """The best plan that the time allows, never worse than eviction's, and a bound.

    Neighbourhoods take all of the time; with `prove`, a tenth of it, and the whole problem as one model the rest. With
    more than one run, recomputations within a stage may come in more orders, and an item twice.
    """
    until = time.monotonic() + seconds
    bound = lower_bound(stages, (0.1 if prove else 0.05) * seconds, workers)
    if bound.extra_ticks is None:
        return Answer(None, 0, 0, "infeasible", runs, bound.stage, bound.stage_nbytes)
    fine, least = stages.refine(runs), bound.extra_ticks
    recomputed = evict(fine)
    if fits(fine, recomputed):
        recomputed = prune(fine, recomputed)
    if prove:
        search = NeighbourhoodSearch(fine, recomputed, least, workers, patience=_PATIENCE)
        recomputed = search.run(min(_MOST_SEARCH_S, 0.1 * seconds))
    else:
        search = NeighbourhoodSearch(fine, recomputed, least, workers, min(_MOST_ROUND_S, 0.1 * seconds))
        recomputed = search.run(until - time.monotonic())
    found = prune(fine, recomputed) if fits(fine, recomputed) else None
    extra = None if found is None else extra_ticks(fine, found)
    proven = extra is not None and extra <= least
    if prove and not proven:
        model = Model(fine, all_recomputations(fine, extra), hint=found or ())
        if extra is not None:
            model.at_most(extra - 1)
        choice = model.solve(until - time.monotonic(), workers)
        proven, least = choice.proven, max(least, choice.bound_ticks)
        if choice.recomputed is not None:
            found = prune(fine, choice.recomputed)
            extra = extra_ticks(fine, found)
    if found is None or extra is None:
        return Answer(None, 0, least, "infeasible" if proven else "unknown", runs)
    return Answer(found, extra, extra if proven else least, "optimal" if proven else "feasible", runs)
