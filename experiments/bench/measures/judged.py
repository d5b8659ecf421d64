"""Does the judge accept all plans of memplan? Ten budgets, from 90 to 20 % of a step's bytes."""

import memplan
from experiments.bench.cases import Case
from experiments.bench.results import Measurement
from memplan.planning.slabs.slabs import Slabs
from memplan.planning.transforms import LoopResiduals

_SHARES = (90, 75, 60, 50, 45, 40, 35, 30, 25, 20)


def measure(case: Case) -> Measurement:
    """One row: how many plans fit, have slabs and have rewritten loops; and all errors."""
    step, args, donated = case.built()
    options = {"donate_argnums": donated, "device": case.device}
    plain_bytes = memplan.jit(step, budget="100%", **options).plan(*args).report.compiled_peak_bytes
    assert plain_bytes is not None
    row = {"plans": 0, "in_slabs": 0, "with_loops": 0, "too_small": 0}
    wrong = {}
    for share in _SHARES:
        try:
            plan = memplan.jit(step, budget=plain_bytes * share // 100, **options).plan(*args).plan
        except memplan.InfeasibleBudgetError:
            row["too_small"] += 1
        except Exception as error:  # the judge refused, or something else failed
            wrong[f"{share} %"] = f"{type(error).__name__}: {error}"[:300]
        else:
            row["plans"] += 1
            kinds = {type(transform) for transform in plan.transforms} if plan else set()
            row["in_slabs"] += Slabs in kinds
            row["with_loops"] += LoopResiduals in kinds
    return Measurement([{**row, "wrong": wrong}])
