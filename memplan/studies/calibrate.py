"""Measures how fast the local device computes, reads and copies. Plans use these rates from a file.

Each rate is timed at growing sizes, until one run takes long enough. Matrix work is timed by class
(`memplan.studies.operations`), and the shares of the peak rates are fitted to it
(`memplan.studies.fit`). What is timed is compiled, run once to warm up, then run several times; the
best run counts.
"""

import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from memplan.hardware.device import Device, HostLink
from memplan.hardware.efficiency import PRODUCT, MatrixShape
from memplan.hardware.measured import MeasuredDevice
from memplan.studies.fit import Timing, fitted
from memplan.studies.operations import OPERATIONS, Operation, Run, chain, nbytes, repeated
from memplan.xla.local import local_device

Notify = Callable[[str, float | None], None]

KERNEL = "shortest kernel, s"
MEMORY = "device memory, bytes/s"
TO_HOST = "device to host, bytes/s"
TO_DEVICE = "host to device, bytes/s"
CLASSES = {
    "matrix product {}, FLOP/s": PRODUCT,
    "convolution {}, FLOP/s": MatrixShape("convolution"),
    "filter gradient {}, FLOP/s": MatrixShape("filter gradient"),
}
"""Names of the rates of matrix work with long sides."""

_RUNS = 7
_ENOUGH_S = 0.06  # After a run this long, try no larger size.
_MIN_S = 2e-3  # Shorter runs are mostly overhead, and count only if there is no longer one.
_DTYPES = "float32", "bfloat16", "float16"
_QUICK_NBYTES = 2**14
_QUICK_EVERY = 5  # of the operations

# A run of an operation. A launch costs the host some 40 us, 1% of a run. On CPUs, which compute an
# operation in 1 to 500 ms, the smallest size serves.
_RUN_S = 4e-3
_OPERATION_S = 5e-4  # from here on, a kernel of a GPU has enough to do in all its cores
_SCALES = 1, 2, 4, 8, 16, 32, 64
_MOST_IN_A_ROW = 64  # which XLA compiles for a GPU in one to two seconds
_OPERATION_RUNS = 4
_MOST_NBYTES = 2**30  # of an operation's arrays; beside them are copies in other layouts

# The line of seconds over bytes goes through the two ends. Between them, arrays stay in caches,
# where a training step's do not.
_SWEEPS = 2**8, 2**12, 2**16, 2**20, 2**24, 2**26, 2**28, 2**30  # bytes of an array
_SHORT_NBYTES = 2**20  # up to here, a launch of the host counts, unless many kernels share it
_SHORT_IN_A_ROW = 256
_SWEEPS_IN_A_ROW = 16
_ENOUGH_SWEEPS_S = 0.2  # of so many in a row; on CPUs, a size beyond the caches


@dataclass(frozen=True)
class Measurements:
    """What was timed on the local device."""

    rates: Mapping[str, float]  # by name, without those of matrix work
    operations: tuple[Timing, ...]


@dataclass(frozen=True)
class _Task:
    """The measurement of one rate."""

    name: str
    sizes: Sequence[int]  # bytes of the array
    make: Callable[[int], Run]  # size -> the run


def calibrate(notify: Notify = lambda stage, share: None, *, quick: bool = False) -> MeasuredDevice:
    """Measure the local device, in one to three minutes.

    Args:
      notify: called with each operation and the completed fraction.
      quick: run a few small operations, once, for tests.

    Raises:
      UnknownDeviceError: a GPU without a specification; XLA needs one to compile for it.
    """
    first = jax.devices()[0]
    device = with_measurements(local_device(), measure(notify, quick=quick), first.platform)
    return MeasuredDevice(device, first.platform, first.device_kind)


def measure(notify: Notify = lambda stage, share: None, *, quick: bool = False) -> Measurements:
    """Time the local device. `quick` runs a few operations once, small, for tests."""
    device = local_device()
    tasks = list(_tasks(jax.devices()[0]))
    operations = OPERATIONS[::_QUICK_EVERY] if quick else OPERATIONS
    steps = len(tasks) + len(operations) + 1
    notify(f"measuring {MEMORY}", 0.0)
    rates = _memory_rates(device.memory_bytes // 16, quick)
    for number, task in enumerate(tasks):
        notify(f"measuring {task.name}", (1 + number) / steps)
        rates[task.name] = _rate(task, device.memory_bytes // 16, quick)
    timings = []
    for number, operation in enumerate(operations):
        notify(f"measuring {operation}", (1 + len(tasks) + number) / steps)
        timings.append(_timing(operation, device, quick))
    return Measurements(rates, tuple(timings))


def _memory_rates(max_nbytes: int, quick: bool) -> dict[str, float]:
    """The line through the seconds of the smallest and of the largest sweep."""
    seconds: dict[int, float] = {}
    for size in _SWEEPS[:4:3] if quick else _SWEEPS:
        if len(seconds) > 1 and size > max_nbytes:
            break
        count = _SHORT_IN_A_ROW if size <= _SHORT_NBYTES else _SWEEPS_IN_A_ROW
        run_s = _best_s(chain(size, count), 1 if quick else _RUNS)
        seconds[size] = run_s / count
        if len(seconds) > 1 and run_s >= _ENOUGH_SWEEPS_S:
            break
    small, large = min(seconds), max(seconds)
    # A sweep reads and writes its array.
    bandwidth = 2 * (large - small) / max(seconds[large] - seconds[small], 1e-9)
    return {KERNEL: max(0.0, seconds[small] - 2 * small / bandwidth), MEMORY: bandwidth}


def _rate(task: _Task, max_nbytes: int, quick: bool) -> float:
    timings = []  # bytes of a run, and its seconds
    for size in (_QUICK_NBYTES,) if quick else task.sizes:
        if timings and size > max_nbytes:
            break
        seconds = _best_s(task.make(size), 1 if quick else _RUNS)
        timings.append((size, seconds))
        if seconds >= _ENOUGH_S:
            break
    long_enough = [timing for timing in timings if timing[1] >= _MIN_S] or timings[-1:]
    return max(size / seconds for size, seconds in long_enough)


def _timing(operation: Operation, device: Device, quick: bool) -> Timing:
    """Time an operation at the size, and as often in a row, as the assumed rates suggest."""
    rate = device.rate(operation.dtype)
    most_nbytes = min(_MOST_NBYTES, device.memory_bytes // 16)
    scale = _SCALES[0]
    for larger in () if quick else _SCALES[1:]:
        is_short = operation.flops(scale) / rate < _OPERATION_S
        if is_short and nbytes(operation, larger) <= most_nbytes:
            scale = larger
    count = min(_MOST_IN_A_ROW, math.ceil(_RUN_S * rate / operation.flops(scale)))
    run, kernels = repeated(operation, scale, 1 if quick else count)
    return Timing(str(operation), kernels, _best_s(run, 1 if quick else _OPERATION_RUNS))


def with_measurements(base: Device, measurements: Measurements, backend: str) -> Device:
    """`base` with what was measured instead of what was assumed.

    A GPU keeps its peak bandwidth and the shares say what is achieved; see `fitted`. The link gets
    the slower direction, since an offloaded value also comes back.
    """
    rates, timings = measurements.rates, measurements.operations
    source = f"Measured on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {_hardware()}"
    device = fitted(_with_rates(base, rates, backend, source), timings)
    dtypes = {kernel.dtype for timing in timings for kernel in timing.matrix_kernels}
    unmeasured = ", ".join(sorted(set(base.flops) - dtypes))
    kept = "shares of other types" if base.target else "ratio to float32"
    sources = (source, f"Not measured, {base.name}'s {kept} kept: {unmeasured}")
    return replace(
        device,
        name=f"{base.name}-measured",
        description=f"{base.description}, measured",
        sources=(*(base.sources if base.target else ()), *sources[: 1 + bool(unmeasured)]),
        efficiency=replace(
            device.efficiency, source=f"{source}: {len(timings)} products and convolutions."
        ),
    )


def with_kernels(card: MeasuredDevice, seconds: Mapping[str, float]) -> MeasuredDevice:
    """The device with the seconds of kernels that ran on it, by fingerprint."""
    sources = (*card.device.sources, f"Seconds of {len(seconds)} different kernels of a step")
    return replace(card, device=replace(card.device, kernels=seconds, sources=sources))


def _with_rates(base: Device, rates: Mapping[str, float], backend: str, source: str) -> Device:
    link = base.link
    if {TO_HOST, TO_DEVICE} <= set(rates):
        meaning = "the slower direction"
        if backend == "cpu":
            meaning = "a memory copy, host memory being device memory"
        link = HostLink(
            name=f"{link.name}-measured",
            bandwidth=min(rates[TO_HOST], rates[TO_DEVICE]),
            latency_s=link.latency_s,
            source=f"{source}: {meaning}. Latency not measured: {link.source}",
        )
    achieved = rates.get(MEMORY, base.achieved_bandwidth)
    peak = base.memory_bandwidth if base.target else achieved
    kernel_s = rates.get(KERNEL, base.efficiency.kernel_s)
    efficiency = replace(base.efficiency, kernel_s=kernel_s, memory=achieved / peak)
    return replace(base, link=link, memory_bandwidth=peak, efficiency=efficiency)


def rates_of(device: Device) -> dict[str, float]:
    """The rates that plans use on a device: those that its kernels achieve, by name."""
    matrix_rates = {
        name.format(dtype): device.achieved_flops(dtype, shape)
        for name, shape in CLASSES.items()
        for dtype in _DTYPES
    }
    return {
        **matrix_rates,
        KERNEL: device.efficiency.kernel_s,
        MEMORY: device.achieved_bandwidth,
        TO_HOST: device.link.bandwidth,
        TO_DEVICE: device.link.bandwidth,
    }


def _best_s(run: Run, runs: int) -> float:
    jax.block_until_ready(run())
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _hardware() -> str:
    """The device and the processor, as text."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = f"{next(names, platform.machine())}, {os.cpu_count()} logical cores"
    first = jax.devices()[0]
    return processor if first.platform == "cpu" else f"{first.device_kind} beside {processor}"


def _tasks(device: Any) -> Iterator[_Task]:
    on_cpu = device.platform == "cpu"
    to_host = _memory_copy if on_cpu else partial(_link_copy, device, True)
    to_device = _memory_copy if on_cpu else partial(_link_copy, device, False)
    sizes = [2**power for power in range(27, 31)]
    yield _Task(TO_HOST, sizes, to_host)
    yield _Task(TO_DEVICE, sizes, to_device)


def _memory_copy(nbytes: int) -> Run:
    """Copy between existing arrays: on a CPU, host memory is device memory."""
    source = np.ones(nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    return lambda: np.copyto(target, source)


def _link_copy(device: Any, out: bool, nbytes: int) -> Run:
    """Copy between the device and pinned host memory, as a planned step does."""
    on_device = SingleDeviceSharding(device, memory_kind="device")
    on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    source, target = (on_device, on_host) if out else (on_host, on_device)
    array = jax.device_put(jnp.ones(nbytes, jnp.uint8), source)
    return lambda: jax.device_put(array, target)
