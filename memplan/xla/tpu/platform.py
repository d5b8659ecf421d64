"""Options and refusals of XLA:TPU, and descriptions of absent TPUs, all by way of libtpu."""

import functools
import re
from types import MappingProxyType
from typing import Any

from memplan.hardware.device import Device, TpuTarget
from memplan.program import compat
from memplan.xla.platform import Options, OverLimitError, Platform, topology_of

# The limit of XLA:TPU's own bytes on the device, in MiB. It refuses what exceeds it.
_LIMIT = "xla_tpu_max_hbm_size_mib"
_MOST_MIB = 2**31 - 1  # of an option with 32 bits
# XLA:TPU rematerializes no value of fewer bytes; `xla_disable_hlo_passes` does not hold it.
_WITHOUT_REMATERIALIZATION = {"xla_tpu_rematerialization_min_size_in_bytes": "1000000000000"}
# Bytes of a limit for the program itself, which memplan does not count: XLA:TPU keeps parts of it
# beside the data. Of six steps with 24 to 276 kernels it took 7 to 56 MiB.
_PROGRAM_BYTES = 128 * 2**20
# How XLA:TPU says what a module takes, before and after it generates code: a number and its unit.
_REFUSAL = re.compile(
    r"E1000.*?(?:\((?=\S+ exceeds available HBM)|Used )(\d+)(?:\.(\d+))?([KMG]?)\b", re.S
)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


class TpuPlatform(Platform):
    """XLA:TPU."""

    rematerializations = MappingProxyType({"XLA's rematerialization": {}})

    def absent(self, device: Device) -> compat.AbsentDevice:
        chip = _target(device)
        return compat.AbsentDevice(device.backend.platform, chip.kind, chip.cores)

    def described_devices(
        self, device: Device, hosts: int = 1, per_host: int = 1
    ) -> tuple[Any, ...]:
        assert hosts == per_host == 1  # `Backend.divides_steps`
        return _described_devices(device)

    def temporary_bytes(self, stats: Any, constant_bytes: int) -> int:
        # XLA:TPU's size of temporaries is of more than the device's memory: 1,047 MiB where its
        # buffer assignment has 722.
        resident = stats.argument_size_in_bytes + stats.output_size_in_bytes
        resident += constant_bytes - stats.alias_size_in_bytes
        return stats.total_allocation_bytes - resident

    def options_for_plan(self, flags: Options, limit_bytes: int, memory_bytes: int) -> Options:
        limit_bytes = min(limit_bytes + _PROGRAM_BYTES, memory_bytes)
        return {**_limited(limit_bytes), **_WITHOUT_REMATERIALIZATION}

    def explanation(self, message: str, device: Device) -> Exception | None:
        refusal = _REFUSAL.search(message)
        if refusal is None:
            return super().explanation(message, device)
        whole, fraction, unit = refusal.groups(default="")
        # The next greater number that XLA would have written, so that no byte is left out.
        digits = int(whole + fraction) + 1
        return OverLimitError(-(-digits * (1 << _UNITS[unit]) // 10 ** len(fraction)))

    def rematerializes_above(self, device: Device, resident_bytes: int) -> int:
        return device.memory_bytes

    def rematerialization(
        self, device: Device, described: bool, limit_bytes: int, resident_bytes: int
    ) -> tuple[Device, Options]:
        return device, _limited(limit_bytes)


def _limited(limit_bytes: int) -> Options:
    return {_LIMIT: str(min(max(1, limit_bytes >> 20), _MOST_MIB))}


@functools.lru_cache(maxsize=16)
def _described_devices(device: Device) -> tuple[Any, ...]:
    chip = _target(device)
    facts = dict(chip.topology_options)
    return tuple(topology_of(device, "TPU", chip.topology, facts).devices)[:1]


def _target(device: Device) -> TpuTarget:
    assert isinstance(device.target, TpuTarget)
    return device.target
