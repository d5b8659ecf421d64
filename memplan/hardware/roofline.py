"""Operation facts -> seconds, by the roofline: Williams, Waterman, Patterson, CACM 52(4), 2009."""

from memplan.hardware.device import Device

_TRITON = (8, 0)  # the lowest compute capability


def kernel_seconds(flops: float, flops_dtype: str, nbytes: float, device: Device) -> float:
    """Seconds of one kernel that moves `nbytes` of device memory.

    Args:
      flops_dtype: operand type of matrix work; '' for work outside the matrix units.
    """
    rate = device.rate(flops_dtype) if flops_dtype else device.vector_flops
    return max(flops / rate, nbytes / device.memory_bandwidth)


def has_triton(device: Device) -> bool:
    """Does XLA:GPU compile matrix products and normalizations of rows with Triton?

    It does from Ampere on.
    """
    return device.compute_capability >= _TRITON


def copy_seconds(nbytes: float, device: Device) -> float:
    """Seconds to copy between device and host memory, one way."""
    return device.link.latency_s + nbytes / device.link.bandwidth
