"""Measures how fast the local device computes, reads and copies. Plans use these rates from a file.

Every operation is timed at growing sizes until one run takes long enough; each size is compiled, run once unmeasured,
then several times. The best run at the best size is the rate.
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
"""A run; its result is waited for."""

MATRIX = "matrix product {}, FLOP/s"
ELEMENTWISE = "elementwise float32, FLOP/s"
MEMORY = "device memory, bytes/s"
TO_HOST, TO_DEVICE = "device to host, bytes/s", "host to device, bytes/s"
LATENCY = "latency of a small copy, s"

_RUNS = 7
_ENOUGH_S = 0.06  # after a run this long, no larger size is tried
_LEAST_S = 2e-3  # a shorter run is mostly overhead, and counts only if there is no longer one
_CHAIN = 64  # multiply-adds per element, so that arithmetic and not memory is the bottleneck
_DTYPES = "float32", "bfloat16", "float16"
_QUICK_NBYTES = 2**14


@dataclass(frozen=True)
class _Task:
    """One rate. `work` and `make` map the bytes of the largest array to FLOPs or bytes of one run, and to the run."""

    name: str
    sizes: Sequence[int]
    work: Callable[[int], float]
    make: Callable[[int], Run]


def calibrate(notify: Notify = lambda stage, share: None) -> MeasuredDevice:
    """Measure the local device, in about half a minute.

    Args:
      notify: called with each operation and the completed fraction.

    Raises:
      UnknownDeviceError: a GPU without a specification; XLA needs one to compile for it.
    """
    return measured_device(measure(notify))


def measure(notify: Notify = lambda stage, share: None, *, quick: bool = False) -> dict[str, float]:
    """The rates of the local device by name. `quick` runs everything once and small: the figures mean nothing."""
    most_nbytes = local_device().memory_bytes // 16
    tasks, rates = list(_tasks(jax.devices()[0])), {}
    for number, task in enumerate(tasks):
        notify(f"measuring {task.name}", number / len(tasks))
        timings = []  # FLOPs or bytes of a run, and its seconds
        for nbytes in (_QUICK_NBYTES,) if quick else task.sizes:
            if timings and nbytes > most_nbytes:
                break
            timings.append((task.work(nbytes), _best_s(task.make(nbytes), 1 if quick else _RUNS)))
            if timings[-1][1] >= _ENOUGH_S:
                break
        long_enough = [one for one in timings if one[1] >= _LEAST_S] or timings[-1:]
        rates[task.name] = timings[0][1] if task.name == LATENCY else max(work / s for work, s in long_enough)
    return rates


def measured_device(rates: Mapping[str, float]) -> MeasuredDevice:
    """The local device with these rates."""
    first = jax.devices()[0]
    return MeasuredDevice(with_rates(local_device(), rates, first.platform), first.platform, first.device_kind)


def with_rates(base: Device, rates: Mapping[str, float], backend: str) -> Device:
    """`base` with the measured rates in place of the assumed ones.

    A matrix rate that was not measured keeps its ratio to float32's. The link gets the slower direction, since an
    offloaded value also comes back.
    """
    today = f"Measured on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {_hardware()}"
    given = {dtype: rates[MATRIX.format(dtype)] for dtype in base.flops if MATRIX.format(dtype) in rates}
    scale = given.get("float32", base.flops["float32"]) / base.flops["float32"]
    scaled = ", ".join(sorted(set(base.flops) - set(given)))
    link = base.link
    if {TO_HOST, TO_DEVICE, LATENCY} <= set(rates):
        what = "a memory copy, host memory being device memory" if backend == "cpu" else "the slower direction"
        source = f"{today}: {what}. The latency includes issuing the copy from Python."
        link = HostLink(f"{link.name}-measured", min(rates[TO_HOST], rates[TO_DEVICE]), rates[LATENCY], source)
    return replace(
        base,
        name=f"{base.name}-measured",
        description=f"{base.description}, measured",
        memory_bandwidth=rates.get(MEMORY, base.memory_bandwidth),
        flops={dtype: given.get(dtype, rate * scale) for dtype, rate in base.flops.items()},
        vector_flops=rates.get(ELEMENTWISE, base.vector_flops),
        link=link,
        sources=(today, *((f"Not measured, {base.name}'s ratio to float32 kept: {scaled}",) if scaled else ())),
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
        yield _Task(MATRIX.format(dtype), sizes, partial(_product_flops, dtype), partial(_product, dtype))
    yield _Task(ELEMENTWISE, [4 * 4**power for power in range(9, 15)], lambda n: 2.0 * _CHAIN * (n // 4), _chain)
    yield _Task(
        MEMORY, [2**power for power in range(28, 33)], lambda n: 2.0 * n, lambda n: _in_place(lambda x: x + 1, n)
    )
    on_cpu, sizes = device.platform == "cpu", [2**power for power in range(27, 31)]
    for name, out in ((TO_HOST, True), (TO_DEVICE, False)):
        yield _Task(name, sizes, float, _memory_copy if on_cpu else partial(_link_copy, device, out))
    yield _Task(LATENCY, [4096], float, _memory_copy if on_cpu else partial(_link_copy, device, True))


def _side(dtype: str, nbytes: int) -> int:
    return math.isqrt(nbytes // jnp.dtype(dtype).itemsize)


def _product_flops(dtype: str, nbytes: int) -> float:
    return 2.0 * _side(dtype, nbytes) ** 3


def _product(dtype: str, nbytes: int) -> Run:
    # Ordinary numbers: zeros and ones draw less power, and some chips clock higher for them.
    shape = (_side(dtype, nbytes),) * 2
    one, other = (jax.random.uniform(jax.random.key(seed), shape, jnp.dtype(dtype), -1, 1) for seed in (0, 1))
    return partial(jax.jit(jnp.matmul).lower(one, other).compile(), one, other)


def _chain(nbytes: int) -> Run:
    factor, term = jnp.float32(0.9), jnp.float32(0.1)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            x = x * factor + term
        return x

    return _in_place(chain, nbytes)


def _in_place(function: Callable[[jax.Array], jax.Array], nbytes: int) -> Run:
    """Apply a function to its own result, in the same buffer: new memory costs system time."""
    held = [jnp.ones(nbytes // 4, jnp.float32)]
    compiled = jax.jit(function, donate_argnums=0).lower(held[0]).compile()

    def run() -> jax.Array:
        held[0] = compiled(held[0])
        return held[0]

    return run


def _memory_copy(nbytes: int) -> Run:
    """Copy between existing arrays: on a CPU, host memory is device memory."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return lambda: np.copyto(target, source)


def _link_copy(device: Any, out: bool, nbytes: int) -> Run:
    """Copy between the device and pinned host memory, as a planned step does."""
    here, host = (SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    inside = jax.device_put(jnp.ones(nbytes, jnp.uint8), here)
    array, to = (inside, host) if out else (jax.device_put(inside, host), here)
    return lambda: jax.device_put(array, to)
