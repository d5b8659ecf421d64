"""The collectives of a partitioned module in the phases of a machine's links.

Nothing changes on a single host. Elsewhere a collective changes only where that is faster.
"""

from memplan.hardware.backend import Backend
from memplan.hardware.machine import Machine
from memplan.xla.collectives.gathers import gathers_in_phases
from memplan.xla.collectives.hoist import hoist_sums
from memplan.xla.collectives.scatters import scatters_in_phases
from memplan.xla.collectives.sums import sums_in_phases
from memplan.xla.collectives.wire import Wire
from memplan.xla.module import Module


def shape(module: Module, machine: Machine, backend: Backend, wire: str | None) -> Module:
    """The module, not scheduled yet, with other collectives; itself if they stay.

    Args:
      wire: the type in which sums of float32 are sent between hosts, "bfloat16" or "float16"; None
        is their own.
    """
    if machine.is_one_host:
        return module
    changes_sums = wire is not None or not backend.sums_along_trees
    shaped = gathers_in_phases(hoist_sums(module) if changes_sums else module, machine)
    if backend.overlaps_collectives:  # else it has fused the slice into its readers
        shaped = scatters_in_phases(shaped, machine)
    if changes_sums:
        shaped = sums_in_phases(shaped, machine, backend, Wire.named(wire) if wire else None)
    return shaped
