"""Fits the shares of a device to the seconds of operations that ran on it."""

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.hardware.device import Device
from memplan.hardware.efficiency import Kind, Shares
from memplan.xla.kernel_cost import KernelCost, class_seconds

_HELD_OUT = 3  # every third operation of a class tests what the others gave
# Kernels achieve 0.8 to 1 of the bandwidth that a sweep does: one that takes less than this many
# times the seconds of its bytes may wait for memory, and says nothing about arithmetic.
_MEMORY_BOUND = 1.25
# Of an operation's seconds, the part that must be its matrix work: an error of a tenth in what the
# others take is then at most a tenth in it.
_CLEAR = 0.5
_FIELDS: dict[Kind, str] = {
    "product": "products",
    "convolution": "convolutions",
    "filter gradient": "filter_gradients",
}


@dataclass(frozen=True)
class Timing:
    """An operation that ran: its kernels, and their seconds together."""

    name: str
    kernels: tuple[KernelCost, ...]
    seconds: float

    @property
    def matrix_kernels(self) -> list[KernelCost]:
        return [kernel for kernel in self.kernels if kernel.flops]


@dataclass(frozen=True)
class _MatrixKernel:
    """The seconds of one kernel of matrix work, without those that every kernel takes."""

    cost: KernelCost
    seconds: float
    memory_s: float

    @property
    def flops(self) -> float:
        """FLOP/s."""
        return self.cost.flops / self.seconds

    @property
    def is_memory_bound(self) -> bool:
        return self.seconds < _MEMORY_BOUND * self.memory_s


def fitted(base: Device, timings: Sequence[Timing]) -> Device:
    """`base` with the shares of the operations, and with the error of those held out.

    Its bandwidth of memory and its seconds of the shortest kernel count as measured. A GPU keeps
    the peak rates of its data sheet. Those of a CPU, which are assumed, become the rates of its
    best kernels. A class that was not measured keeps its share.
    """
    used, held_out = _split(timings)
    kernels = [kernel for timing in used for kernel in _matrix_kernels(base, timing)]
    device = base if base.target else _with_best_rates(base, kernels)
    device = _with_volume_copies(_with_shares(device, kernels), kernels)
    errors = [abs(predicted_seconds(device, timing) / timing.seconds - 1) for timing in held_out]
    return _with_efficiency(device, error=max(errors, default=None))


def predicted_seconds(device: Device, timing: Timing) -> float:
    """Seconds of an operation's kernels, one after another."""
    return _seconds(device, timing.kernels)


def _seconds(device: Device, kernels: Iterable[KernelCost]) -> float:
    return sum(class_seconds(cost, device) for cost in kernels)


def _split(timings: Iterable[Timing]) -> tuple[list[Timing], list[Timing]]:
    """The timings to fit shares to, and those held out of every class; the first is never."""
    classes = defaultdict[Hashable, list[Timing]](list)
    for timing in timings:
        if matrix_kernels := timing.matrix_kernels:
            shape = matrix_kernels[0].shape
            classes[shape.kind, shape.aligned, shape.volume].append(timing)
    held_out = [timing for members in classes.values() for timing in members[2::_HELD_OUT]]
    names = {timing.name for timing in held_out}
    used = [timing for members in classes.values() for timing in members]
    return [timing for timing in used if timing.name not in names], held_out


def _matrix_kernels(device: Device, timing: Timing) -> list[_MatrixKernel]:
    """The kernel of an operation's matrix work: what its other kernels take is predicted.

    Nothing if these are predicted to take most of the whole.
    """
    matrix = timing.matrix_kernels
    others_s = _seconds(device, (cost for cost in timing.kernels if not cost.flops))
    seconds = (timing.seconds - others_s) / len(matrix) - device.efficiency.kernel_s
    memory_s = matrix[0].device_nbytes / device.achieved_bandwidth
    is_clear = seconds * len(matrix) > _CLEAR * timing.seconds
    return [_MatrixKernel(matrix[0], seconds, memory_s)] if is_clear else []


def _with_best_rates(device: Device, kernels: Iterable[_MatrixKernel]) -> Device:
    """The device at the rates of its best kernels, of which shares are shares.

    A type that no kernel multiplied keeps its ratio to float32.
    """
    best: dict[str, float] = {}
    for kernel in kernels:
        if kernel.is_memory_bound:
            continue
        best[kernel.cost.dtype] = max(best.get(kernel.cost.dtype, 0.0), kernel.flops)
    scale = best.get("float32", device.rate("float32")) / device.rate("float32")
    flops = {dtype: best.get(dtype, scale * rate) for dtype, rate in device.flops.items()}
    return replace(device, flops=flops, vector_flops=scale * device.vector_flops)


def _with_shares(device: Device, kernels: Sequence[_MatrixKernel]) -> Device:
    units, cores = [], []
    for kernel in kernels:
        # A volume's kernel on a GPU also changes the layout.
        if not (kernel.is_memory_bound or (device.target and kernel.cost.shape.volume)):
            (units if device.has_matrix_units(kernel.cost.dtype) else cores).append(kernel)
    efficiency = device.efficiency
    return _with_efficiency(
        device,
        matrix_units=_shares(device, efficiency.matrix_units, units),
        cores=_shares(device, efficiency.cores, cores),
    )


def _shares(device: Device, shares: Shares, kernels: Iterable[_MatrixKernel]) -> Shares:
    """The median share of each class, and how many times as long work takes that is not aligned."""
    achieved = defaultdict[Kind, list[float]](list)
    unaligned: list[tuple[Kind, float]] = []
    for kernel in kernels:
        shape = kernel.cost.shape
        share = kernel.flops / device.rate(kernel.cost.dtype)
        share /= shares.factor(replace(shape, aligned=True))
        if shape.aligned:
            achieved[shape.kind].append(share)
        else:
            unaligned.append((shape.kind, share))
    fields = {_FIELDS[kind]: statistics.median(values) for kind, values in achieved.items()}
    shares = replace(shares, **fields)
    times = [shares.of_kind(kind) / share for kind, share in unaligned]
    return replace(shares, unaligned=statistics.median(times)) if times else shares


def _with_volume_copies(device: Device, kernels: Iterable[_MatrixKernel]) -> Device:
    """The device with what its convolutions of volumes take besides, on a GPU."""
    times = [
        (kernel.seconds - max(arithmetic_s, kernel.memory_s)) / kernel.memory_s
        for kernel in kernels
        if device.target and kernel.cost.shape.volume
        for arithmetic_s in [kernel.cost.flops / _achieved(device, kernel.cost)]
    ]
    copies = max(0.0, statistics.median(times)) if times else device.efficiency.volume_copies
    return _with_efficiency(device, volume_copies=copies)


def _achieved(device: Device, cost: KernelCost) -> float:
    return device.achieved_flops(cost.dtype, cost.shape)


def _with_efficiency(device: Device, **changes: Any) -> Device:
    return replace(device, efficiency=replace(device.efficiency, **changes))
