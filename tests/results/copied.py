"""A step that is planned for a described GPU with copies to the host."""

from __future__ import annotations

from functools import cache

import memplan
from memplan.report.model import Report
from tests.xla.steps import dense


@cache
def report_with_copies() -> Report:
    step, args = dense(512, 12)
    plain = memplan.jit(step, device="v100", donate_argnums=0).plan(*args).report
    budget = int(0.6 * plain.baseline_peak_bytes)
    planned = memplan.jit(step, budget=budget, device="v100", donate_argnums=0)
    return planned.plan(*args).report
