"""Measures how fast the local device computes, reads and copies. Plans use these rates from a file.

Each operation is timed at growing sizes, until one run takes long enough. At each size it is
compiled, run once to warm up, then timed several times. The rate is that of the best run at the
best size.
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
from memplan.hardware.measured import MeasuredDevice
from memplan.xla.local import local_device

Notify = Callable[[str, float | None], None]
Run = Callable[[], Any]
"""Starts a run and returns its result; the caller waits for that."""

MATRIX = "matrix product {}, FLOP/s"
ELEMENTWISE = "elementwise float32, FLOP/s"
MEMORY = "device memory, bytes/s"
TO_HOST = "device to host, bytes/s"
TO_DEVICE = "host to device, bytes/s"
LATENCY = "latency of a small copy, s"

_RUNS = 7
_ENOUGH_S = 0.06  # After a run this long, try no larger size.
_MIN_S = 2e-3  # Shorter runs are mostly overhead, and count only if there is no longer one.
_CHAIN = 64  # multiply-adds per element: the bottleneck is arithmetic, not memory
_DTYPES = "float32", "bfloat16", "float16"
_QUICK_NBYTES = 2**14


@dataclass(frozen=True)
class _Task:
    """The measurement of one rate."""

    name: str
    sizes: Sequence[int]  # bytes of the largest array
    work: Callable[[int], float]  # size -> FLOPs or bytes of one run
    make: Callable[[int], Run]  # size -> the run


def calibrate(notify: Notify = lambda stage, share: None) -> MeasuredDevice:
    """Measure the local device, in about half a minute.

    Args:
      notify: called with each operation and the completed fraction.

    Raises:
      UnknownDeviceError: a GPU without a specification; XLA needs one to compile for it.
    """
    return measured_device(measure(notify))


def measure(notify: Notify = lambda stage, share: None, *, quick: bool = False) -> dict[str, float]:
    """The rates of the local device by name. `quick` runs everything once, small, for tests."""
    max_nbytes = local_device().memory_bytes // 16
    tasks = list(_tasks(jax.devices()[0]))
    rates = {}
    for number, task in enumerate(tasks):
        notify(f"measuring {task.name}", number / len(tasks))
        timings = []  # FLOPs or bytes of a run, and its seconds
        for nbytes in (_QUICK_NBYTES,) if quick else task.sizes:
            if timings and nbytes > max_nbytes:
                break
            seconds = _best_s(task.make(nbytes), 1 if quick else _RUNS)
            timings.append((task.work(nbytes), seconds))
            if seconds >= _ENOUGH_S:
                break
        if task.name == LATENCY:
            rates[task.name] = timings[0][1]
            continue
        long_enough = [timing for timing in timings if timing[1] >= _MIN_S] or timings[-1:]
        rates[task.name] = max(work / seconds for work, seconds in long_enough)
    return rates


def measured_device(rates: Mapping[str, float]) -> MeasuredDevice:
    """The local device with these rates."""
    first = jax.devices()[0]
    device = with_rates(local_device(), rates, first.platform)
    return MeasuredDevice(device, first.platform, first.device_kind)


def with_rates(base: Device, rates: Mapping[str, float], backend: str) -> Device:
    """`base` with measured rates instead of assumed ones.

    A matrix rate that was not measured keeps its ratio to float32's. The link gets the slower
    direction, since an offloaded value also comes back.
    """
    source = f"Measured on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {_hardware()}"
    names = {dtype: MATRIX.format(dtype) for dtype in base.flops}
    measured_flops = {dtype: rates[name] for dtype, name in names.items() if name in rates}
    scale = measured_flops.get("float32", base.flops["float32"]) / base.flops["float32"]
    unmeasured_dtypes = ", ".join(sorted(set(base.flops) - set(measured_flops)))
    link = base.link
    if {TO_HOST, TO_DEVICE, LATENCY} <= set(rates):
        meaning = "the slower direction"
        if backend == "cpu":
            meaning = "a memory copy, host memory being device memory"
        link = HostLink(
            name=f"{link.name}-measured",
            bandwidth=min(rates[TO_HOST], rates[TO_DEVICE]),
            latency_s=rates[LATENCY],
            source=f"{source}: {meaning}. The latency includes issuing the copy from Python.",
        )
    sources = (source,)
    if unmeasured_dtypes:
        sources += (f"Not measured, {base.name}'s ratio to float32 kept: {unmeasured_dtypes}",)
    return replace(
        base,
        name=f"{base.name}-measured",
        description=f"{base.description}, measured",
        memory_bandwidth=rates.get(MEMORY, base.memory_bandwidth),
        flops={
            dtype: measured_flops.get(dtype, rate * scale) for dtype, rate in base.flops.items()
        },
        vector_flops=rates.get(ELEMENTWISE, base.vector_flops),
        link=link,
        sources=sources,
        efficiency=base.efficiency.of_measured_rates,
    )


def rates_of(device: Device) -> dict[str, float]:
    """The rates of a device that plans use, by the names of `measure`."""
    return {
        **{MATRIX.format(dtype): device.rate(dtype) for dtype in _DTYPES},
        ELEMENTWISE: device.vector_flops,
        MEMORY: device.memory_bandwidth,
        TO_HOST: device.link.bandwidth,
        TO_DEVICE: device.link.bandwidth,
        LATENCY: device.link.latency_s,
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
    for dtype in _DTYPES:
        sizes = [jnp.dtype(dtype).itemsize * 4**power for power in range(8, 15)]
        yield _Task(
            MATRIX.format(dtype), sizes, partial(_product_flops, dtype), partial(_product, dtype)
        )
    yield _Task(
        ELEMENTWISE,
        [4 * 4**power for power in range(9, 15)],
        lambda n: 2.0 * _CHAIN * (n // 4),
        _chain,
    )
    yield _Task(
        MEMORY,
        [2**power for power in range(28, 33)],
        lambda n: 2.0 * n,
        lambda n: _in_place(lambda x: x + 1, n),
    )
    on_cpu = device.platform == "cpu"
    to_host = _memory_copy if on_cpu else partial(_link_copy, device, True)
    to_device = _memory_copy if on_cpu else partial(_link_copy, device, False)
    sizes = [2**power for power in range(27, 31)]
    yield _Task(TO_HOST, sizes, float, to_host)
    yield _Task(TO_DEVICE, sizes, float, to_device)
    yield _Task(LATENCY, [4096], float, to_host)


def _side(dtype: str, nbytes: int) -> int:
    return math.isqrt(nbytes // jnp.dtype(dtype).itemsize)


def _product_flops(dtype: str, nbytes: int) -> float:
    return 2.0 * _side(dtype, nbytes) ** 3


def _product(dtype: str, nbytes: int) -> Run:
    # Random numbers: zeros and ones draw less power, so some chips clock higher.
    shape = (_side(dtype, nbytes),) * 2
    keys = jax.random.split(jax.random.key(0))
    matrices = [jax.random.uniform(key, shape, jnp.dtype(dtype), -1, 1) for key in keys]
    return partial(jax.jit(jnp.matmul).lower(*matrices).compile(), *matrices)


def _chain(nbytes: int) -> Run:
    factor = jnp.float32(0.9)
    term = jnp.float32(0.1)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            x = x * factor + term
        return x

    return _in_place(chain, nbytes)


def _in_place(function: Callable[[jax.Array], jax.Array], nbytes: int) -> Run:
    """Apply a function to its own result, in place: new memory would cost system time."""
    buffer = [jnp.ones(nbytes // 4, jnp.float32)]
    compiled = jax.jit(function, donate_argnums=0).lower(buffer[0]).compile()

    def run() -> jax.Array:
        buffer[0] = compiled(buffer[0])
        return buffer[0]

    return run


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
