"""The compiler's callback before scheduling: collectives in the phases of a machine's links."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.hardware.machine import Machine
from memplan.verify.same_collectives import judge_shaped
from memplan.xla.collectives.shape import shape
from memplan.xla.collectives.unexpected import Gather, unexpected_gathers
from memplan.xla.frames import put_into_names, tables_of, take_out_of_names
from memplan.xla.module import read_module

_OVERLAPPED = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,  # under way at once; by default one
}
_SEPARATE = {  # as the callback writes them
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    # XLA begins the reduce-scatters of a loop's body, where they are written before it schedules, a trip early, and
    # carries a whole layer's gradient for it: 34.0 MiB of a loop over four layers of 4 MiB for 30.0.
    # And it makes one all-reduce over all devices of two in a row: of a 3D U-Net that 8 x 8 V100s divide in two
    # dimensions, the sums of norms took 103 ms of a step for 9.
    "xla_disable_hlo_passes": "collective-pipeliner-forward,all-reduce-folder",
}
# XLA:CPU's pass makes one sum of all gradients, which then all have to exist at once.
_CPU_COMBINER = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def collective_flags(machine: Machine, on_gpu: bool) -> Mapping[str, Any]:
    """Compiler options under which collectives stay as they are written; on a single host XLA:GPU combines them."""
    if not on_gpu:
        return _CPU_COMBINER
    return _OVERLAPPED if machine.is_one_host else {**_OVERLAPPED, **_SEPARATE}


@dataclass
class Shaping:
    """Called with the text of a module that XLA has partitioned."""

    machine: Machine
    on_gpu: bool
    between_hosts: str | None  # the type in which sums travel there, if it is not their own
    asked: frozenset[int] = frozenset()  # elements on one device of arrays that the program says how to divide
    runs: bool = True  # what is compiled for its schedule alone is not judged
    gathers: tuple[Gather, ...] = field(default=(), init=False)  # unexpected ones
    _tables: str | None = field(default=None, init=False)  # of source lines, where the module was changed

    def __call__(self, text: str) -> str | None:
        plain = read_module(text, scheduled=False)
        self.gathers = unexpected_gathers(plain, self.asked)
        shaped = shape(plain, self.machine, self.on_gpu, self.between_hosts)
        if shaped is plain:
            return None
        if self.runs:
            judge_shaped(plain, shaped, len(self.machine.devices), self.between_hosts)
        self._tables = tables_of(plain)
        return put_into_names(shaped)

    def with_lines(self, scheduled: str) -> str:
        """The text of the scheduled module with the source lines that it had before it was changed."""
        return scheduled if self._tables is None else take_out_of_names(scheduled, self._tables)
