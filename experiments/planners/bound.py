"""A lower bound on the extra time, valid for every sequence of computations.

Where keeping everything exceeds the budget, items have to be absent. An item that is absent somewhere between two
neighbouring uses is recomputed before the second, and different gaps need different recomputations. What these are
computed from is not counted: the least costly set of gaps that frees enough at every crowded stage is a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from experiments.planners.model import Effort
from experiments.planners.stages import Stages


@dataclass(frozen=True)
class Bound:
    """What no plan beats.

    Attributes:
      extra_ticks: every plan within the budget takes at least this much longer; None where there is no plan.
      stage: the stage that proves it: its working set is above the budget, or cannot be freed enough; -1 otherwise.
      stage_nbytes: the least bytes at that stage.
    """

    extra_ticks: int | None
    stage: int = -1
    stage_nbytes: int = 0


def lower_bound(stages: Stages, seconds: float = 5.0, workers: int = 2) -> Bound:
    """The bound, or the proof that no plan fits."""
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
    return Bound(_cheapest_absence(stages, needed, gaps, Effort(seconds, workers)))


def _cheapest_absence(stages: Stages, needed: np.ndarray, gaps: list[tuple[int, int, int]], effort: Effort) -> int:
    over = needed - stages.budget_bytes
    for first, end, item in gaps:
        over[first:end] += stages.nbytes[item]
    model = cp_model.CpModel()
    absent = [model.new_bool_var("") for _ in gaps]
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for number, (first, end, _) in enumerate(gaps):
        starting.setdefault(first, []).append(number)
        ending.setdefault(end, []).append(number)
    live: set[int] = set()
    for stage in range(stages.count):
        live.difference_update(ending.get(stage, ()))
        live.update(starting.get(stage, ()))
        if over[stage] > 0:
            across = sorted(live)
            sizes = [stages.nbytes[gaps[number][2]] for number in across]
            model.add(cp_model.LinearExpr.weighted_sum([absent[n] for n in across], sizes) >= int(over[stage]))
    costs = [stages.ticks[item] or 0 for _, _, item in gaps]
    model.minimize(cp_model.LinearExpr.weighted_sum(absent, costs))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = effort.workers
    solver.parameters.max_time_in_seconds = effort.seconds
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        return 0
    return max(0, int(np.ceil(solver.best_objective_bound - 1e-6)))
