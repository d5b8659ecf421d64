"""The device that jax runs on here, as a specification."""

from __future__ import annotations

import os
from dataclasses import replace

import jax

from memplan.hardware import catalog
from memplan.hardware.device import Device


def local_device() -> Device:
    """The default backend's first device: a named GPU with the memory that jax may use, or this CPU."""
    first = jax.local_devices()[0]
    if first.platform == "cpu":
        return catalog.local_cpu(os.cpu_count() or 1, host_memory_bytes())
    stats = first.memory_stats() or {}
    known = closest_name(first.device_kind)
    spec = catalog.named(known)
    return replace(spec, memory_bytes=int(stats.get("bytes_limit", spec.memory_bytes)))


def closest_name(kind: str) -> str:
    """The specification whose name stands in what the driver calls the card, for example `NVIDIA H200`."""
    plain = kind.lower().replace(" ", "").replace("-", "")
    found = [name for name in catalog.names() if name.replace("-", "") in plain]
    if not found:
        raise catalog.UnknownDeviceError(
            f"this machine's {kind!r} has no specification here. Pass device= with the nearest of: "
            f"{', '.join(catalog.names())}."
        )
    return max(found, key=len)


def is_here(device: Device, platform: str, kind: str) -> bool:
    """True where a measured device is the one that jax runs on: it is planned for as that one, else as an absent GPU.

    A CPU stands for any CPU: its rates are taken as they are.

    Raises:
      UnknownDeviceError: a CPU where jax runs on another backend, or a GPU of which too little is known to compile for.
    """
    first = jax.local_devices()[0]
    if platform == "cpu" and first.platform != "cpu":
        raise catalog.UnknownDeviceError(
            f"{device.name} is a measured CPU, and jax runs on {first.device_kind!r} here. Set JAX_PLATFORMS=cpu, or "
            "calibrate this device."
        )
    if platform != "cpu" and device.target is None:
        raise catalog.UnknownDeviceError(
            f"{device.name} was measured on {kind!r}, which has no specification by name, so that XLA cannot be told "
            f"what to compile for. Plan for the nearest of: {', '.join(catalog.names())}."
        )
    return first.platform == platform and (platform == "cpu" or first.device_kind == kind)


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def observed_peak_bytes() -> int | None:
    """What the backend says its device memory peaked at; None where it does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else None
