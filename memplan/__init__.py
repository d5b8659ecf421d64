"""memplan: train what does not fit. `memplan.jit` is `jax.jit` with a device-memory budget."""

from memplan.api import jit
from memplan.errors import (
    InfeasibleBudgetError,
    MemplanError,
    PlanMismatchError,
    UnsupportedProgramError,
)
from memplan.planning import devices
from memplan.planning.plan import Plan
from memplan.report.model import Report

__all__ = [
    "InfeasibleBudgetError",
    "MemplanError",
    "Plan",
    "PlanMismatchError",
    "Report",
    "UnsupportedProgramError",
    "devices",
    "jit",
]
