"""A planner for large steps: evict until it fits, then improve by large-neighbourhood search while there is time."""

from __future__ import annotations

import time

from memplan.planning.bound import lower_bound
from memplan.planning.evict import evict, prune
from memplan.planning.improve import Search, Told
from memplan.planning.stages import Answer, Stages, extra_ticks

_BOUND_SHARE = 0.1  # of the time


def solve(stages: Stages, seconds: float, workers: int = 2, seed: int = 0, told: Told | None = None) -> Answer:
    """A good plan within the time, never worse than eviction's; proven optimal only where the lower bound meets it."""
    until = time.monotonic() + seconds
    bound = lower_bound(stages, _BOUND_SHARE * seconds, workers)
    if bound.extra_ticks is None:
        return Answer(None, 0, 0, "infeasible", 1, bound.stage, bound.stage_nbytes)
    first = evict(stages, seconds=until - time.monotonic())
    if first is None:
        return Answer(None, 0, bound.extra_ticks, "unknown")
    again = prune(stages, first, 0.3 * (until - time.monotonic()))
    search = Search(stages, again, bound.extra_ticks, seed, workers, min(3.0, 0.1 * seconds), told)
    again = search.run(until - time.monotonic())
    again = prune(stages, again, until - time.monotonic())
    extra = extra_ticks(stages, again)
    return Answer(again, extra, bound.extra_ticks, "optimal" if extra <= bound.extra_ticks else "feasible")
