"""A device's specification -> the text that describes an absent GPU to XLA (`gpu_device_info`)."""

import functools
import tempfile
import threading
from pathlib import Path

from memplan.errors import UnknownDeviceError
from memplan.hardware.device import Device, GpuTarget

# Resident threads per core by compute capability, if they are not 2048.
_MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
# Facts that all of these GPUs share.
_COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 1024,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "device_address_bits": 64,
}


def target_config(device: Device) -> str:
    """Protocol-buffer text for `topologies.get_topology_desc(..., target_config=...)`.

    Raises:
      UnknownDeviceError: the device is not a GPU.
    """
    if not isinstance(device.target, GpuTarget):
        hint = "`memplan devices` lists GPUs."
        raise UnknownDeviceError(
            f"{device.name} is not a GPU: there is nothing to compile for. {hint}",
        )
    chip = device.target
    major, minor = chip.compute_capability
    feature = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    facts = {
        **_COMMON,
        "threads_per_core_limit": _MOST_THREADS.get((major, minor), 2048),
        "shared_memory_per_core": chip.shared_memory_per_core,
        "shared_memory_per_block_optin": chip.shared_memory_per_block_optin,
        "core_count": chip.core_count,
        "fpus_per_core": chip.fpus_per_core,
        "memory_bandwidth": int(device.memory_bandwidth),
        "l2_cache_size": chip.l2_cache_bytes,
        "clock_rate_ghz": chip.clock_ghz,
        "device_memory_size": device.memory_bytes,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in facts.items())
    return f"""gpu_device_info {{
{lines}
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {major}.{minor}"
  name: "{device.name}" runtime_version: "12.8.0" driver_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{device.name}"
"""


# A larger file is removed: XLA reads and writes the whole file at every compilation.
_MOST_BYTES = 2**26


def kernel_cache_file(target: GpuTarget) -> Path:
    """The file for `xla_gpu_kernel_cache_file`, which keeps machine code until the process ends.

    That code never runs, yet generating it takes XLA most of a compilation, and the candidates for
    one step share most kernels. Each GPU and thread has a file of its own, as the keys in the file
    do not name the GPU, and XLA locks no file.
    """
    path = Path(_folder(target, threading.get_ident()).name) / "kernels"
    if path.exists() and path.stat().st_size > _MOST_BYTES:
        path.unlink()
    return path


@functools.cache
def _folder(target: GpuTarget, thread: int) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="memplan-kernels-", ignore_cleanup_errors=True)
