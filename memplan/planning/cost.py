"""Operation facts -> seconds, by the roofline: Williams, Waterman, Patterson, CACM 52(4), 2009."""

from __future__ import annotations

from collections.abc import Iterable

from memplan.planning.devices import Device
from memplan.planning.graph import Graph, Op

_TRITON = (8, 0)  # the least compute capability


def kernel_seconds(flops: float, flops_dtype: str, nbytes: float, device: Device) -> float:
    """Seconds of one kernel that moves `nbytes` of device memory; matrix work where `flops_dtype` names a type."""
    rate = device.rate(flops_dtype) if flops_dtype else device.vector_flops
    return max(flops / rate, nbytes / device.memory_bandwidth)


def has_triton(device: Device) -> bool:
    """XLA:GPU compiles matrix products, and what normalizes rows, with Triton from Ampere on."""
    return device.target is not None and device.target.compute_capability >= _TRITON


def calls_library(op: Op, device: Device) -> bool:
    """True for a convolution by cuDNN and a product by cuBLAS."""
    if not op.flops_dtype or device.target is None:
        return False
    return op.name == "conv_general_dilated" or not has_triton(device)


def op_seconds(graph: Graph, op: Op, device: Device) -> float:
    """Seconds of an operation on its own: everything it reads and writes crosses device memory."""
    if op.fusion == "view":
        return 0.0
    if op.crosses_memories:
        return copy_seconds(sum(map(graph.nbytes, op.outputs)), device)
    nbytes = sum(map(graph.nbytes, op.outputs)) + sum(map(graph.nbytes, dict.fromkeys(op.inputs)))
    return kernel_seconds(op.flops, op.flops_dtype, nbytes + op.traffic_nbytes, device)


def copy_seconds(nbytes: float, device: Device) -> float:
    """Seconds to copy between device and host memory, one way."""
    return device.link.latency_s + nbytes / device.link.bandwidth


def seconds(graph: Graph, ops: Iterable[int], device: Device) -> float:
    """Sum of `op_seconds` over op ids."""
    return sum(op_seconds(graph, graph.ops[op], device) for op in ops)
