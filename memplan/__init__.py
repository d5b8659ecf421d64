"""memplan: train what does not fit. `memplan.jit` is `jax.jit` with a device-memory budget."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan import parallel
    from memplan.api import jit, largest
    from memplan.errors import (
        InfeasibleBudgetError,
        MemplanError,
        OutOfMemoryError,
        PlanMismatchError,
        UnsupportedProgramError,
    )
    from memplan.hardware import catalog as devices
    from memplan.planning.plan import Plan
    from memplan.report.model import Report

__all__ = [
    "InfeasibleBudgetError",
    "MemplanError",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "Report",
    "UnsupportedProgramError",
    "devices",
    "jit",
    "largest",
    "parallel",
]

_HOMES = {
    "InfeasibleBudgetError": "memplan.errors",
    "MemplanError": "memplan.errors",
    "OutOfMemoryError": "memplan.errors",
    "Plan": "memplan.planning.plan",
    "PlanMismatchError": "memplan.errors",
    "Report": "memplan.report.model",
    "UnsupportedProgramError": "memplan.errors",
    "devices": "memplan.hardware.catalog",
    "jit": "memplan.api",
    "largest": "memplan.api",
    "parallel": "memplan.parallel",
}

# Without a driver jax's CUDA plugin refuses to load, loudly, unless it is told to leave the check out; it is wanted for
# its compiler. Read by jax when its backends start.
if not os.path.exists("/proc/driver/nvidia/version"):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are asked for: the planning half works, and tests, without jax."""
    if name == "__version__":
        return importlib.import_module("memplan.io").version_of("memplan")
    if name in _HOMES:
        home = importlib.import_module(_HOMES[name])
        return home if name in ("devices", "parallel") else getattr(home, name)
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")
