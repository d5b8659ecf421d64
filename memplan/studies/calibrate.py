"""Measure the local backend and make a device of it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from memplan.errors import UnknownDeviceError
from memplan.hardware import measured
from memplan.hardware.catalog import LINKS, local_cpu
from memplan.hardware.device import Device
from memplan.hardware.measured import Conditions, Measurement, Spec
from memplan.report.hardware import Calibration
from memplan.xla.local import host_memory_bytes, local_device
from memplan.xla.microbench import Patience, Task, tasks

Notify = Callable[[str, float | None], None]
_PACKAGES = ("jax", "jaxlib", "numpy")


def calibrate(
    notify: Notify = lambda stage, share: None,
    patience: Patience | None = None,
    chosen: Sequence[Task] | None = None,
) -> Spec:
    """Measure the local backend: about half a minute.

    Args:
      notify: told each operation and the share that is done.
      patience: how long to measure; None for the usual.
      chosen: what to measure; None for everything.
    """
    base, load = base_device(), os.getloadavg()[0]
    chosen = tasks() if chosen is None else chosen
    patience = patience or Patience(most_nbytes=max(1, base.memory_bytes // 16))
    measurements: list[Measurement] = []
    for number, task in enumerate(chosen):
        notify(f"measuring {task.name}", number / len(chosen))
        measurements.append(task.measure(patience))
    first = jax.devices()[0]
    conditions = Conditions(
        platform=first.platform,
        device_kind=first.device_kind,
        hardware=hardware(first),
        load=(load, os.getloadavg()[0]),
        versions=versions(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        measurements=tuple(measurements),
    )
    return measured.calibrate(base, conditions)


def base_device() -> Device:
    """What is assumed of the local device. Of a GPU without a specification only its memory is known."""
    try:
        return local_device()
    except UnknownDeviceError:
        first = jax.devices()[0]
        memory_bytes = int((first.memory_stats() or {}).get("bytes_limit", host_memory_bytes()))
        stand_in = local_cpu(os.cpu_count() or 1, memory_bytes)
        return Device(
            name=first.device_kind.lower().replace(" ", "-"),
            description=first.device_kind,
            memory_bytes=memory_bytes,
            memory_bandwidth=stand_in.memory_bandwidth,
            flops=stand_in.flops,
            vector_flops=stand_in.vector_flops,
            link=LINKS["pcie3x16"],
            sources=("No specification by this name",),
            target=None,
        )


def versions() -> tuple[tuple[str, str], ...]:
    """((package, version), ...) of what the figures depend on."""
    packages = ((name, importlib.metadata.version(name)) for name in _PACKAGES)
    return (("python", platform.python_version()), *packages)


def hardware(first: Any) -> str:
    """The device and the processor beside it, for people."""
    cores = f"{os.cpu_count()} logical cores"
    processor = f"{processor_name() or platform.machine()}, {cores}"
    return processor if first.platform == "cpu" else f"{first.device_kind} beside {processor}"


def processor_name() -> str:
    """As the kernel tells it; '' where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def calibration(spec: Spec) -> Calibration:
    """The measurements beside what is assumed of this device."""
    base = base_device()
    if base.target is None and spec.conditions.platform != "cpu":
        return Calibration(spec, {})
    assumed = {measured.MATRIX.format(dtype): rate for dtype, rate in base.flops.items()}
    assumed |= {
        measured.ELEMENTWISE: base.vector_flops,
        measured.MEMORY: base.memory_bandwidth,
        measured.LATENCY: base.link.latency_s,
    }
    assumed |= dict.fromkeys((measured.TO_HOST, measured.TO_DEVICE), base.link.bandwidth)
    return Calibration(spec, assumed)
