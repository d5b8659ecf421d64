"""Data parallelism shaped to the machine: a single-device step over a mesh, its processes watched and resumed.

May import `program`, `planning`, `hardware`, and from `xla` what the local device is.
"""

from __future__ import annotations

from memplan.parallel.meshes import mesh
from memplan.parallel.runtime.checkpoint import Checkpoints
from memplan.parallel.runtime.cluster import Cluster, initialize
from memplan.parallel.runtime.preflight import agree, preflight
from memplan.parallel.runtime.watchdog import Watchdog
from memplan.parallel.step import DataParallel, data_parallel

__all__ = [
    "Checkpoints",
    "Cluster",
    "DataParallel",
    "Watchdog",
    "agree",
    "data_parallel",
    "initialize",
    "mesh",
    "preflight",
]
