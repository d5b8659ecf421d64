"""Machines whose partitions stand in the order of their devices."""

from memplan.hardware.machine import Machine
from memplan.hardware.topology import Topology


def on(topology: Topology, partitions: int) -> Machine:
    """Partitions on a topology in its own order."""
    return Machine(topology, tuple(range(partitions)))
