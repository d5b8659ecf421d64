"""A report of nothing, for those that say more."""

from typing import Any

from memplan.report.model import Report


def plain_report(**fields: Any) -> Report:
    peaks = ("baseline", "predicted", "compiled", "host")
    sizes = (
        *(f"{peak}_peak_bytes" for peak in peaks),
        "host_budget_bytes",
        "offloaded_bytes",
        "floor_bytes",
    )
    zero = dict.fromkeys((*sizes, "recomputed_flops"), 0)
    second = dict.fromkeys(("baseline_step_s", "predicted_step_s", "lower_bound_s"), 0.1)
    names = {"device": "v100", "runs_on": "cpu", "status": "untouched", "planner": "none"}
    entries = {**zero, **second, **names, "budget_bytes": 2**20, "observed_peak_bytes": None}
    return Report(**{**entries, **fields})
