"""The device that a row was measured on; it counts as real only under NVIDIA's own driver."""

import os
import re
from pathlib import Path
from typing import Any

import jax

from memplan import io

STAND_IN = "XLA's GPU runtime on a stand-in driver"

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
# Matches NVIDIA's file, whose name has the version.
_DRIVER = re.compile(r"/libcuda\.so\.(\d+\.[\d.]+)$", re.MULTILINE)
_NODES = ("/dev/nvidia0", "/dev/dxg")  # Under Linux and under Windows.


def this_card() -> dict[str, Any]:
    """Where jax runs; `how` names it for people. Starts the default backend."""
    first = jax.local_devices()[0]
    driver = driver_version(Path("/proc/self/maps").read_text()) if first.platform == "gpu" else ""
    real = bool(driver) and any(map(os.path.exists, _NODES))
    how = (
        f"{first.device_kind}, driver {driver}"
        if real
        else STAND_IN
        if first.platform == "gpu"
        else "a CPU"
    )
    return {
        "name": first.device_kind, "how": how, "platform": first.platform, "real": real,
        "memory_bytes": int((first.memory_stats() or {}).get("bytes_limit", 0)),
        "versions": {
            name: version for name, version in io.versions(*_PACKAGES) if version != "0+source"
        },
    }  # fmt: skip


def driver_version(maps: str) -> str:
    """Version of NVIDIA's CUDA driver among a process's mapped files; "" if it is not there."""
    match = _DRIVER.search(maps)
    return match[1] if match else ""
