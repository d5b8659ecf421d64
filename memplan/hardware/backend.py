"""What XLA does for a kind of device, as answers to the questions that memplan has.

Nothing else asks whether a device is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One of XLA's back ends."""

    platform: str  # jax's name
    alignment: int  # bytes: the offset of every buffer is a multiple
    has_own_memory: bool  # apart from the host's, so that values can move between them
    # A fusion may have several results, and rounds narrow floats as several fusions would.
    merges_fusions: bool
    # A fusion may be written over an operand if it reads each element before it writes it; else
    # only an elementwise one may.
    fusions_overwrite_operands: bool
    collectives_overwrite_operands: bool  # a collective may be written over its operand
    # It schedules collectives beside kernels.
    overlaps_collectives: bool
    sums_along_trees: bool  # its all-reduce is NCCL's, which sends each byte between hosts once
    scatters_sums: bool  # it has a reduce-scatter that adds right
    exchanges_tuples: bool  # its all-to-all takes an operand for each device, not one array
    rematerializes: bool  # it recomputes values by itself where a step exceeds the device's memory
    launches_graphs: bool  # kernels run in graphs of launches
    indexes_in_32_bits: bool  # its libraries cannot index arrays of 2**31 elements
    # Convolutions inside of loops and branches are fast only if channels are the last dimension.
    convolves_channels_last: bool
    pools_memory: bool  # jax takes a share of the memory for a pool, and leaves the rest
    # XLA packs buffers again after memplan, within a limit that it is given, by which it schedules
    # them, too. It refuses what exceeds the limit.
    packs_again: bool
    growth: float  # the most by which its packing exceeds memplan's, as a factor
    divides_steps: bool  # memplan has rules for the collectives of steps over several devices

    def limit_for(self, nbytes: int) -> int:
        """A limit of bytes that a module keeps which is predicted to take so many."""
        return int(self.growth * nbytes)


GPU = Backend(
    platform="cuda",
    alignment=256,
    has_own_memory=True,
    merges_fusions=True,
    fusions_overwrite_operands=True,
    collectives_overwrite_operands=True,
    overlaps_collectives=True,
    sums_along_trees=True,
    scatters_sums=True,
    exchanges_tuples=False,
    rematerializes=True,
    launches_graphs=True,
    indexes_in_32_bits=True,
    convolves_channels_last=False,
    pools_memory=True,
    packs_again=False,
    growth=1.0,
    divides_steps=True,
)
CPU = Backend(
    platform="cpu",
    alignment=64,  # `cpu_function_runtime::MinAlign`
    has_own_memory=False,
    merges_fusions=False,
    fusions_overwrite_operands=False,
    collectives_overwrite_operands=False,
    overlaps_collectives=False,
    sums_along_trees=False,  # gloo's is a ring
    scatters_sums=False,  # gloo's gives wrong sums
    exchanges_tuples=True,
    rematerializes=False,
    launches_graphs=False,
    indexes_in_32_bits=False,
    convolves_channels_last=True,
    pools_memory=False,
    packs_again=False,
    growth=1.0,
    divides_steps=True,
)
TPU = Backend(
    platform="tpu",
    alignment=2**14,  # as offsets in XLA:TPU's dumps of buffer assignments
    has_own_memory=True,
    merges_fusions=False,
    fusions_overwrite_operands=False,
    collectives_overwrite_operands=False,
    overlaps_collectives=False,
    sums_along_trees=False,
    scatters_sums=False,
    exchanges_tuples=False,
    rematerializes=True,
    launches_graphs=False,
    indexes_in_32_bits=False,
    convolves_channels_last=False,
    pools_memory=False,
    packs_again=True,
    growth=1.09,  # 1.087 and 1.05 for MLPs in slabs, at most 1.02 for other plans
    divides_steps=False,
)
