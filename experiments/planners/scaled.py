"""A planner for large steps: evict until it fits, then improve by large-neighbourhood search while there is time."""

from __future__ import annotations

import time

from experiments.planners.bound import lower_bound
from experiments.planners.evict import evict, prune
from experiments.planners.lns import NeighbourhoodSearch
from experiments.planners.stages import Answer, Stages, extra_ticks, fits

_BOUND_SHARE = 0.05  # of the time
_MOST_ROUND_S = 3.0


def solve(stages: Stages, seconds: float, workers: int = 2) -> Answer:
    """A good plan within the time, never worse than eviction's; proven optimal only where the lower bound meets it."""
    until = time.monotonic() + seconds
    bound = lower_bound(stages, _BOUND_SHARE * seconds, workers)
    if bound.extra_ticks is None:
        return Answer(None, 0, 0, "infeasible", 1, bound.stage, bound.stage_nbytes)
    recomputed = evict(stages)
    if fits(stages, recomputed):
        recomputed = prune(stages, recomputed)
    share_s = min(_MOST_ROUND_S, 0.1 * seconds)
    search = NeighbourhoodSearch(stages, recomputed, bound.extra_ticks, workers, share_s)
    recomputed = search.run(until - time.monotonic())
    if not fits(stages, recomputed):
        return Answer(None, 0, bound.extra_ticks, "unknown")
    recomputed = prune(stages, recomputed)
    extra = extra_ticks(stages, recomputed)
    return Answer(recomputed, extra, bound.extra_ticks, "optimal" if extra <= bound.extra_ticks else "feasible")
