"""Options and failures of XLA:GPU."""

import functools
import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from memplan import io
from memplan.errors import UnsupportedProgramError
from memplan.hardware.device import Device, GpuTarget
from memplan.program import compat
from memplan.xla.gpu.described import kernel_cache_file, target_config
from memplan.xla.platform import Options, Platform, topology_of, without_pass

# XLA rematerializes by itself what takes more than this fraction of a GPU's memory.
XLA_LIMIT = 0.8
# XLA leaves this fraction of its limit, without arguments and outputs, to temporaries
# (xla_gpu_memory_limit_slop_factor).
_SLOP = 0.95
# Disable XLA's own rematerialization: it runs after the hook, and counts host memory as memory of
# the device. A plan of 8 GiB on a V100 and 8 GiB on the host got clones, and a warning on stderr.
_REMATERIALIZATION = "rematerialization"
_WITHOUT_TIMING = {"xla_gpu_autotune_level": 0}  # No GPU is there to time kernels on.
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
# jaxlib 0.10 and 0.11 say this of a product's tiles. If XLA times kernels, it skips such tiles.
_BAD_TILES = ("Couldn't find output tile sizes", "No supported config found")
# Disable the pass that annotates slices where it fails: on a slice in a loop whose offset another
# loop looks up, as `jnp.searchsorted` of one number does (openxla/xla#49299). Without the pass,
# kernels move slices of host memory.
_ANNOTATOR = "dynamic-slice-annotator"
_CANNOT_EVALUATE = "Failed to evaluate instruction"
# Mosaic kernels are assembled in this pipeline; jaxlib 0.12 adds its name and ptxas' message.
# jaxlib keeps the architecture of the first kernel of a process, and ptxas refuses newer ones.
_MOSAIC_FAILS = re.compile(r"(?:Mosaic GPU p|P)ass pipeline failed[^\n]*")
_NEEDS_AMPERE = "Triton support is only enabled for Ampere"


class GpuPlatform(Platform):
    """XLA:GPU."""

    rematerializations = MappingProxyType(
        {
            "XLA's rematerialization": {},
            "XLA's rematerialization and host offload": {
                "xla_gpu_enable_host_memory_offloading": True
            },
        }
    )

    def absent(self, device: Device) -> compat.AbsentDevice:
        chip = _target(device)
        return compat.AbsentDevice(
            device.backend.platform, device.description, chip.core_count, chip.compute_capability
        )

    def described_devices(
        self, device: Device, hosts: int = 1, per_host: int = 1
    ) -> tuple[Any, ...]:
        return described_devices(device, hosts, per_host)

    def options_for_absent(self, device: Device) -> Options:
        kernels = {"xla_gpu_kernel_cache_file": str(kernel_cache_file(_target(device)))}
        return {**_WITHOUT_TIMING, **kernels}

    def options_for_plan(self, flags: Options, limit_bytes: int, memory_bytes: int) -> Options:
        return without_pass(flags, _REMATERIALIZATION)

    def other_options(self, flags: Options, message: str, described: bool) -> Options | None:
        if described and any(words in message for words in _BAD_TILES):
            return _WITHOUT_TRITON
        if _CANNOT_EVALUATE in message:
            return without_pass(flags, _ANNOTATOR)
        return None

    def explanation(self, message: str, device: Device) -> Exception | None:
        version = io.version_of("jaxlib")
        if failure_line := _MOSAIC_FAILS.search(message):
            return UnsupportedProgramError(
                f"jaxlib {version} cannot assemble the step's Mosaic kernel for "
                f"{device.name} ({failure_line[0]}). It cannot if this process has assembled "
                "one for an older GPU before: plan for the newest GPU first, or for each GPU in a "
                "process of its own."
            )
        if _NEEDS_AMPERE in message:
            return UnsupportedProgramError(
                f"the step has a Triton kernel (of Pallas, or a library's), which XLA compiles "
                f"for Ampere and later GPUs, not for {device.name}. Plan for another device, "
                "or use the operation's form without a kernel of its own."
            )
        return super().explanation(message, device)

    def rematerializes_above(self, device: Device, resident_bytes: int) -> int:
        return resident_bytes + int(
            _SLOP * max(0.0, XLA_LIMIT * device.memory_bytes - resident_bytes)
        )

    def rematerialization(
        self, device: Device, described: bool, limit_bytes: int, resident_bytes: int
    ) -> tuple[Device, Options]:
        """See `Platform.rematerialization`.

        XLA:GPU's limit is (80 % of device memory - arguments and outputs) x
        `xla_gpu_memory_limit_slop_factor` / 100. A described device gets exactly the memory that
        makes this the limit, a real one only a whole percentage of its own.
        """
        if described:
            limited = replace(device, memory_bytes=int(limit_bytes / XLA_LIMIT) + 1)
            return limited, {"xla_gpu_memory_limit_slop_factor": 100}
        whole = XLA_LIMIT * device.memory_bytes - resident_bytes
        percent = int(100 * (limit_bytes - resident_bytes) / whole) if whole > 0 else 100
        return device, {"xla_gpu_memory_limit_slop_factor": max(1, percent)}


@functools.lru_cache(maxsize=16)
def described_devices(device: Device, hosts: int = 1, per_host: int = 1) -> tuple[Any, ...]:
    """Described GPUs, host by host.

    Raises:
      UnknownDeviceError: the compiler for GPUs is not installed.
    """
    facts = {"topology": f"1x{hosts}x{per_host}", "target_config": target_config(device)}
    return tuple(topology_of(device, "GPU", device.name, facts).devices)


def _target(device: Device) -> GpuTarget:
    assert isinstance(device.target, GpuTarget)
    return device.target
