"""memplan: train what does not fit. `memplan.jit` is `jax.jit` with a device-memory budget."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from memplan.errors import (
    InfeasibleBudgetError,
    MemplanError,
    OutOfMemoryError,
    PlanMismatchError,
    UnsupportedProgramError,
)
from memplan.hardware import catalog as devices
from memplan.io import version_of
from memplan.planning.plan import Plan
from memplan.report.model import Report

if TYPE_CHECKING:
    from memplan import parallel
    from memplan.api import jit, largest

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

__version__ = version_of("memplan")

# Without a driver jax's CUDA plugin refuses to load, loudly, unless it is told to leave the check out; it is wanted for
# its compiler. Read by jax when its backends start.
if not os.path.exists("/proc/driver/nvidia/version"):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def __getattr__(name: str) -> Any:
    """Public names that need jax are loaded when they are asked for: planning and its tests do without."""
    if name == "parallel":
        return importlib.import_module("memplan.parallel")
    if name in __all__:
        return getattr(importlib.import_module("memplan.api"), name)
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")
