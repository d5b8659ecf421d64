"""Operation facts -> seconds, by the roofline: Williams, Waterman, Patterson, CACM 52(4), 2009."""

from __future__ import annotations

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


def op_seconds(graph: Graph, op: Op, device: Device) -> float:
    """Seconds of an operation on its own: everything it reads and writes crosses device memory."""
    if op.fusion == "view":
        return 0.0
    nbytes = sum(map(graph.nbytes, op.outputs)) + sum(map(graph.nbytes, dict.fromkeys(op.inputs)))
    return kernel_seconds(op.flops, op.flops_dtype, nbytes + op.traffic_nbytes, device)


def copy_seconds(nbytes: float, device: Device) -> float:
    """Seconds to copy between device and host memory, one way."""
    return device.link.latency_s + nbytes / device.link.bandwidth
