"""Plans for stages: memplan's eviction, then CP-SAT, which improves and may prove the plan."""

import time

from experiments.planners.bound import lower_bound
from experiments.planners.evict import evict, prune
from experiments.planners.lns import NeighbourhoodSearch
from experiments.planners.model import Model, all_recomputations
from experiments.planners.stages import Answer, Stages, extra_ticks, fits

_MAX_ROUND_S = 3.0  # longest time for one neighbourhood
_MAX_SEARCH_S, _PATIENCE = 4.0, 20  # longest search before a proof: seconds, rounds without gain


def solve(
    stages: Stages, seconds: float, prove: bool = True, runs: int = 1, workers: int = 2
) -> Answer:
    """The best plan found in time, never worse than eviction's, and a lower bound.

    The local search takes all of the time. With `prove`, it takes a tenth, and the whole problem as
    one model takes the remainder. With more than one run, a stage may recompute in more orders, and
    an item twice.
    """
    until = time.monotonic() + seconds
    bound = lower_bound(stages, (0.1 if prove else 0.05) * seconds, workers)
    if bound.extra_ticks is None:
        return Answer(None, 0, 0, "infeasible", runs, bound.stage, bound.stage_nbytes)
    fine, bound_ticks = stages.refine(runs), bound.extra_ticks
    recomputed = evict(fine)
    if fits(fine, recomputed):
        recomputed = prune(fine, recomputed)
    if prove:
        search = NeighbourhoodSearch(fine, recomputed, bound_ticks, workers, patience=_PATIENCE)
        recomputed = search.run(min(_MAX_SEARCH_S, 0.1 * seconds))
    else:
        search = NeighbourhoodSearch(
            fine, recomputed, bound_ticks, workers, min(_MAX_ROUND_S, 0.1 * seconds)
        )
        recomputed = search.run(until - time.monotonic())
    best = prune(fine, recomputed) if fits(fine, recomputed) else None
    extra = None if best is None else extra_ticks(fine, best)
    proven = extra is not None and extra <= bound_ticks
    if prove and not proven:
        model = Model(fine, all_recomputations(fine, extra), hint=best or ())
        if extra is not None:
            model.at_most(extra - 1)
        choice = model.solve(until - time.monotonic(), workers)
        proven, bound_ticks = choice.proven, max(bound_ticks, choice.bound_ticks)
        if choice.recomputed is not None:
            best = prune(fine, choice.recomputed)
            extra = extra_ticks(fine, best)
    if best is None or extra is None:
        return Answer(None, 0, bound_ticks, "infeasible" if proven else "unknown", runs)
    return Answer(
        best, extra, extra if proven else bound_ticks, "optimal" if proven else "feasible", runs
    )
