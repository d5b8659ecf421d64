"""Data parallelism shaped to the machine: a single-device step over a mesh, started, checked, watched and resumed."""

from __future__ import annotations

from memplan.parallel.checkpoint import Checkpoints
from memplan.parallel.cluster import Cluster, initialize
from memplan.parallel.meshes import mesh
from memplan.parallel.preflight import agree, preflight
from memplan.parallel.step import DataParallel, data_parallel
from memplan.parallel.watchdog import Watchdog

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
