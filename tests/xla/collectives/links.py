"""Machines whose outer links are so slow that phases pay for a single byte."""

import math

from memplan.hardware.machine import Machine
from memplan.hardware.topology import Axis, Topology
from tests.hardware.machines import on


def steep(*sizes: int) -> Machine:
    """Levels of these sizes, each with links a thousand times as fast as those of the level around it."""
    axes = [
        Axis(f"level{at}", size, 0.0, 1000.0**at, shared=at < len(sizes) - 1)
        for at, size in enumerate(sizes)
    ]
    return on(Topology("steep", "for tests", tuple(axes), ()), math.prod(sizes))
