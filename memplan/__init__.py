"""memplan: train what does not fit. `memplan.jit` is `jax.jit` with a device-memory budget."""

import glob
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

if TYPE_CHECKING:
    from memplan import api as api
    from memplan import equinox as equinox
    from memplan import keras as keras
    from memplan import nnx as nnx
    from memplan import parallel
    from memplan.api import jit, largest
    from memplan.hardware import catalog as devices
    from memplan.planning.plan import Plan
    from memplan.report.difference import Difference, Tolerance
    from memplan.report.model import Report

__all__ = [
    "Difference",
    "InfeasibleBudgetError",
    "MemplanError",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "Report",
    "Tolerance",
    "UnsupportedProgramError",
    "devices",
    "jit",
    "largest",
    "parallel",
]

_MODULES = {
    "api": "memplan.api",
    "devices": "memplan.hardware.catalog",
    "equinox": "memplan.equinox",
    "keras": "memplan.keras",
    "nnx": "memplan.nnx",
    "parallel": "memplan.parallel",
}
_HOMES = {
    "Difference": "memplan.report.difference",
    "Plan": "memplan.planning.plan",
    "Report": "memplan.report.model",
    "Tolerance": "memplan.report.difference",
    "jit": "memplan.api",
    "largest": "memplan.api",
}

# Disable the check of jax's CUDA plugin if there is no driver. memplan needs the plugin for its
# compiler, but with the check it does not load. jax reads the variable when its backends start.
if not os.path.exists("/proc/driver/nvidia/version"):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Likewise libtpu, if there is no TPU: it would ask a server for one, for seconds, and complain.
if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/*"):
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any that libtpu knows
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes on this machine use it, too
    }.items():
        os.environ.setdefault(variable, value)


def __getattr__(name: str) -> Any:
    """Load a public name on its first use, since every run of pytest imports this package."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":
        return importlib.import_module("memplan.io").version_of("memplan")
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")
