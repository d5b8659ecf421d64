"""XLA's callback before scheduling: splits collectives into phases by the machine's links."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.hardware.backend import Backend
from memplan.hardware.machine import Machine
from memplan.verify.same_collectives import judge_shaped
from memplan.xla.collectives.shape import shape
from memplan.xla.collectives.unexpected import Gather, unexpected_gathers
from memplan.xla.module import Module

# Run collectives beside kernels, and one at a time, as is XLA's default. With up to eight at once,
# ResNet-50 over 8 x 8 H100s took 27.3 ms instead of 26.2, over as many A100s 39.9 instead of 37.9,
# and a decoder divided by FSDP over 2 x 4 A100s 61.6 instead of 60.3.
_OVERLAPPED = {"xla_gpu_enable_latency_hiding_scheduler": True}
# Keep gathers and scatters as the callback writes them. Without the disabled pass, XLA starts a
# reduce-scatter of a loop's body one trip early if it is written before XLA schedules, and carries
# a whole layer's gradient for it: 34.0 MiB instead of 30.0 in a loop over four layers of 4 MiB.
_SEPARATE = {
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    "xla_disable_hlo_passes": "collective-pipeliner-forward",
}
# Disable the pass of XLA:CPU that makes one sum of all gradients: all would have to exist at once.
_CPU_COMBINER = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def collective_flags(machine: Machine, backend: Backend) -> Mapping[str, Any]:
    """Compiler options that keep collectives as written; on one host, XLA:GPU combines them."""
    if not backend.overlaps_collectives:
        return _CPU_COMBINER
    return _OVERLAPPED if machine.is_one_host else {**_OVERLAPPED, **_SEPARATE}


@dataclass
class Shaping:
    """XLA calls it with a partitioned module."""

    machine: Machine
    backend: Backend
    between_hosts: str | None  # element type of sums between hosts, if not their own
    # per-device element counts of the arrays whose sharding the program states
    expected_sizes: frozenset[int] = frozenset()
    # gathers that the user does not expect
    gathers: tuple[Gather, ...] = field(default=(), init=False)

    def __call__(self, plain: Module) -> Module | None:
        self.gathers = unexpected_gathers(plain, self.expected_sizes)
        shaped = shape(plain, self.machine, self.backend, self.between_hosts)
        if shaped is plain:
            return None
        judge_shaped(plain, shaped, len(self.machine.devices), self.between_hosts)
        return shaped
