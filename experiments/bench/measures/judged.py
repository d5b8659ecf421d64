"""Does the judge accept every plan that memplan makes? Ten budgets, from nearly all that a step takes to a fifth."""

import memplan
from experiments.bench.cases import Case
from experiments.bench.results import Found

_SHARES = (90, 75, 60, 50, 45, 40, 35, 30, 25, 20)


def measure(case: Case) -> Found:
    """One row: how many plans fit, how many of these have slabs and rewritten loops; what was raised where none did."""
    step, args, donated = case.built()
    options = {"donate_argnums": donated, "device": case.device}
    plain_bytes = memplan.jit(step, **options).plan(*args).report.compiled_peak_bytes
    row = {"plans": 0, "in_slabs": 0, "with_loops": 0, "too_small": 0}
    wrong = {}
    for share in _SHARES:
        try:
            plan = memplan.jit(step, budget=plain_bytes * share // 100, **options).plan(*args).plan
        except memplan.InfeasibleBudgetError:
            row["too_small"] += 1
        except Exception as error:  # a judge that refuses is what is looked for, and so is everything else
            wrong[f"{share} %"] = f"{type(error).__name__}: {error}"[:300]
        else:
            row["plans"] += 1
            row["in_slabs"] += bool(plan and plan.slabs)
            row["with_loops"] += bool(plan and any(plan.loops))
    return Found([{**row, "wrong": wrong}])
