"""Operation facts -> seconds: a roofline at the rates that kernels of a class achieve.

The roofline is that of Williams, Waterman, Patterson, CACM 52(4), 2009.
"""

from collections.abc import Iterable

from memplan.hardware.device import Device
from memplan.hardware.efficiency import PRODUCT, MatrixShape
from memplan.hardware.library_calls import LibraryCall, library_seconds

_TRITON = (8, 0)  # the lowest compute capability
# Seconds of the host for each array of a call. Beside an H200, calls with 10, 100, 400 and 1,000
# arrays in and out took 0.17, 0.94, 3.1 and 6.5 ms, kernels of 1 us among them, and steps with 431
# and 400 arrays 3.3 and 2.8 ms more than their kernels (`experiments/gpu/results`).
_DISPATCH_S = 6e-6


def kernel_seconds(
    flops: float,
    flops_dtype: str,
    nbytes: float,
    device: Device,
    shape: MatrixShape = PRODUCT,
    library_calls: Iterable[LibraryCall] = (),
) -> float:
    """Seconds of one kernel that moves `nbytes` of device memory.

    Args:
      flops_dtype: operand type of matrix work; '' for work outside the matrix units.
      shape: of the matrix work.
      library_calls: what it computes besides.
    """
    efficiency = device.efficiency
    rate = device.achieved_flops(flops_dtype, shape) if flops_dtype else device.vector_flops
    memory_s = nbytes / device.achieved_bandwidth
    conversion_s = efficiency.volume_copies * memory_s if shape.volume else 0.0
    library_s = sum(library_seconds(call, device) for call in library_calls)
    return efficiency.kernel_s + conversion_s + max(flops / rate, memory_s) + library_s


def has_triton(device: Device) -> bool:
    """Does XLA:GPU compile matrix products and normalizations of rows with Triton?

    It does from Ampere on.
    """
    return device.compute_capability >= _TRITON


def copy_seconds(nbytes: float, device: Device) -> float:
    """Seconds to copy between device and host memory, one way."""
    return device.link.latency_s + nbytes / device.link.bandwidth


def dispatch_seconds(arrays: int) -> float:
    """Seconds in which the host passes so many arrays to a step on a GPU, before it starts."""
    return arrays * _DISPATCH_S
