"""CUDA graphs of a compiled program.

They follow the rule of XLA:GPU's CommandBufferConversionPass with its default flags. A graph is a
run of five or more consecutive launches in the schedule: kernels, copies on the device, products by
cuBLAS, kernels of cuDNN's graphs. All other launches are individual and end the run: cuDNN's other
convolutions, loops, whose bodies have their own graphs, and both the start and the done of a copy
to or from the host.

A module does not tell the launches of collectives, conditionals, sorts, copies of slices on the
device and other custom calls. The driver is for CUDA 12.3 or later: for an older one, XLA of jax
0.11 leaves products out of graphs.
"""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from memplan.hardware.device import Device
from memplan.xla.host_copies import is_annotated, is_copy
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.replay import is_free

SMALLEST = 5  # launches: XLA's xla_gpu_graph_min_graph_size

_IN_GRAPHS = ("__cublas$gemm", "__cublas$lt$matmul")  # Library calls that may be in a graph.
_BY_ITSELF = "__cudnn$conv"  # Library calls that are launched individually.
_CUSTOM_FUSION = '"custom_fusion_config"'  # In a configuration: one of XLA's hand-written kernels.
_SETTING = re.compile(r"xla_gpu_(enable_command_buffer|graph_min_graph_size)")


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of XLA's runtime on a GPU."""

    sizes: tuple[int, ...]  # launches in every graph of the program, in order
    graphs: int  # launched in a step; the graphs of a loop's body count once for each trip
    singles: int  # kernels, library calls and copies outside of graphs in a step


def launches(module: Module, device: Device) -> Launches | None:
    """Launches of a compiled program; None if its module does not tell them.

    They follow from XLA's default flags: see `has_own_rule`.
    """
    try:
        runs = list(_runs(module, module.entry, device, 1))
    except _NotToldError:
        return None
    graphs = [(size, times) for size, times in runs if size >= SMALLEST]
    return Launches(
        sizes=tuple(size for size, _ in graphs),
        graphs=sum(times for _, times in graphs),
        singles=sum(size * times for size, times in runs if size < SMALLEST),
    )


def has_own_rule(compiler_options: Collection[str]) -> bool:
    """Do options of a compilation, or XLA_FLAGS, choose the contents of graphs?"""
    return bool(_SETTING.search(" ".join([*compiler_options, os.environ.get("XLA_FLAGS", "")])))


class _NotToldError(Exception):
    pass


def _runs(
    module: Module,
    body: Computation,
    device: Device,
    times: int,
) -> Iterator[tuple[int, int]]:
    """Lengths of runs of launches, each with how often it runs in a step.

    A run is as long as possible if its launches may be in a graph; other launches are runs of one.
    """
    size = 0
    for op in body.ops.values():
        if is_free(op):
            continue
        if _may_be_in_a_graph(module, body, op, device):
            size += 1
            continue
        yield size, times
        size = 0
        if op.opcode == "while":
            if op.trip_count is None:
                raise _NotToldError
            yield from _runs(module, module[op.body], device, times * op.trip_count)
        elif not op.opcode.endswith("-done"):
            yield 1, times
    yield size, times


def _may_be_in_a_graph(module: Module, body: Computation, op: Instruction, device: Device) -> bool:
    """Raises _NotToldError."""
    touched = (*op.result, *(array for name in op.operands for array in body.ops[name].result))
    on_host = any(array.on_host for array in touched)
    match op.opcode:
        case "while" | "copy-done" | "fusion-done":
            return False
        case "copy-start" | "fusion-start" if on_host and is_copy(module, op, device):
            return False
        case "copy":
            return not on_host
        case "fusion" if not is_annotated(module, op) and _CUSTOM_FUSION not in op.backend_config:
            return True
        case "custom-call" if op.target.startswith(_BY_ITSELF):
            return False
        case "custom-call" if op.target.startswith(_IN_GRAPHS):
            return True
    raise _NotToldError
