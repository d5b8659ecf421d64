"""A lower bound on the extra time, valid for every sequence of computations.

Where keeping everything exceeds the budget, some items must be dropped. An item dropped between two
neighbouring uses is recomputed before the second, and different gaps need different recomputations.
The inputs of these recomputations are not counted, so the cheapest set of gaps that frees enough
bytes at every crowded stage is a lower bound.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from experiments.planners.stages import Stages


@dataclass(frozen=True)
class Bound:
    """A lower bound on every plan."""

    extra_ticks: int | None  # of every plan within the budget; None: no plan exists
    stage: int = -1  # the stage that proves that no plan exists
    stage_nbytes: int = 0  # lower bound on the bytes of that stage


def lower_bound(stages: Stages, seconds: float = 5.0, workers: int = 2) -> Bound:
    """The bound, or a proof that no plan fits."""
    needed = np.array(stages.least_nbytes, dtype=np.int64)
    gaps: list[tuple[int, int, int]] = []  # first stage, end, item
    for item, uses in enumerate(stages.uses):
        for before, use in pairwise((stages.home[item], *uses)):
            if before + 1 < use:
                if stages.ticks[item] is None:
                    needed[before + 1 : use] += stages.nbytes[item]
                else:
                    gaps.append((before + 1, use, item))
    worst = int(needed.argmax())
    if needed[worst] > stages.budget_bytes:
        return Bound(None, worst, int(needed[worst]))
    over = needed - stages.budget_bytes
    for first, end, item in gaps:
        over[first:end] += stages.nbytes[item]
    model = cp_model.CpModel()
    absent = [model.new_bool_var("") for _ in gaps]
    starting, ending = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, (first, end, _) in enumerate(gaps):
        starting[first].append(number)
        ending[end].append(number)
    live: set[int] = set()
    for stage in range(stages.count):
        live.difference_update(ending[stage])
        live.update(starting[stage])
        if over[stage] > 0:
            across = sorted(live)
            sizes = [stages.nbytes[gaps[number][2]] for number in across]
            model.add(
                cp_model.LinearExpr.weighted_sum([absent[n] for n in across], sizes)
                >= int(over[stage])
            )
    costs = [stages.ticks[item] or 0 for _, _, item in gaps]
    model.minimize(cp_model.LinearExpr.weighted_sum(absent, costs))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    best = (
        0 if status == cp_model.MODEL_INVALID else int(np.ceil(solver.best_objective_bound - 1e-6))
    )
    return Bound(max(0, best))
