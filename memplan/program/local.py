"""The device that jax runs on here, as a specification."""

from __future__ import annotations

import os
from dataclasses import replace

import jax

from memplan.planning import devices
from memplan.planning.devices import Device


def local_device() -> Device:
    """The default backend's first device: a named GPU with the memory that jax may use, or this CPU."""
    first = jax.devices()[0]
    if first.platform == "cpu":
        return devices.local_cpu(os.cpu_count() or 1, host_memory_bytes())
    stats = first.memory_stats() or {}
    known = closest_name(first.device_kind)
    spec = devices.named(known)
    return replace(spec, memory_bytes=int(stats.get("bytes_limit", spec.memory_bytes)))


def closest_name(kind: str) -> str:
    """The specification whose name stands in what the driver calls the card, for example `NVIDIA H200`."""
    plain = kind.lower().replace(" ", "").replace("-", "")
    found = [name for name in devices.names() if name.replace("-", "") in plain]
    if not found:
        raise devices.UnknownDeviceError(
            f"this machine's {kind!r} has no specification here. Pass device= with the nearest of: "
            f"{', '.join(devices.names())}."
        )
    return max(found, key=len)


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def observed_peak_bytes() -> int | None:
    """What the backend says its device memory peaked at; None where it does not tell."""
    stats = jax.devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else None
