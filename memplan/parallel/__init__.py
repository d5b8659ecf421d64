"""Data parallelism: a step for one device over a mesh, and the processes of a run.

May import `program`, `planning`, `hardware`, and from `xla` what the local device is.
"""

from memplan.parallel.cluster import Cluster, initialize
from memplan.parallel.meshes import mesh
from memplan.parallel.step import DataParallel, data_parallel

__all__ = ["Cluster", "DataParallel", "data_parallel", "initialize", "mesh"]
