"""What a row was measured on. It is a real card's only where NVIDIA's own driver answers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import jax

from memplan import io

STAND_IN = "XLA's GPU runtime on a stand-in driver"

_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_DRIVER = re.compile(r"/libcuda\.so\.(\d+\.[\d.]+)$", re.MULTILINE)  # NVIDIA's file has its version in its name
_NODES = ("/dev/nvidia0", "/dev/dxg")  # the second under Windows


@dataclass(frozen=True)
class Card:
    """Where jax runs: the driver's name of it; `how`, what figures are of, for people; bytes that jax may use."""

    name: str
    how: str
    platform: str
    real: bool
    memory_bytes: int
    versions: dict[str, str]


def this_card() -> Card:
    """Of the default backend, which it starts."""
    first = jax.local_devices()[0]
    driver = driver_version(Path("/proc/self/maps").read_text()) if first.platform == "gpu" else ""
    real = bool(driver) and any(map(os.path.exists, _NODES))
    how = f"{first.device_kind}, driver {driver}" if real else STAND_IN if first.platform == "gpu" else "a CPU"
    memory_bytes = int((first.memory_stats() or {}).get("bytes_limit", 0))
    versions = {name: version for name, version in io.versions(*_PACKAGES) if version != "0+source"}
    return Card(first.device_kind, how, first.platform, real, memory_bytes, versions)


def driver_version(maps: str) -> str:
    """Of the CUDA driver among the files that a process has mapped; "" where it is not NVIDIA's."""
    found = _DRIVER.search(maps)
    return found[1] if found else ""
