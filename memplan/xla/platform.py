"""The questions that compiling for a kind of device raises, with the answers for a CPU.

`memplan.xla.gpu` and `memplan.xla.tpu` have the answers for the others. Nothing else knows options
or messages of one back end of XLA's.
"""

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax.experimental import topologies

from memplan import io
from memplan.errors import UnknownDeviceError, UnsupportedProgramError
from memplan.hardware.device import Device
from memplan.program import compat
from memplan.units import format_bytes

Options = Mapping[str, Any]
"""Compiler options by name."""
DISABLED_PASSES = "xla_disable_hlo_passes"
_OFFLOAD_FAULTS = ("change layout memory space", "host_offload")  # openxla/xla#47362, #47380


class OverLimitError(ValueError):
    """XLA refuses to compile a module, which takes more than the limit that it was given.

    Attributes:
      device_bytes: what the module takes, by XLA's count, rounded up as far as XLA rounds it.
    """

    def __init__(self, device_bytes: int) -> None:
        super().__init__(f"XLA refuses the step, which takes {format_bytes(device_bytes)}.")
        self.device_bytes = device_bytes


class Platform:
    """A back end of XLA's. A CPU is always here, so that it is never described.

    Attributes:
      rematerializations: XLA's own ways to stay within a limit, by what they are called: options.
    """

    rematerializations: Mapping[str, Options] = MappingProxyType({})

    def absent(self, device: Device) -> compat.AbsentDevice:
        """What jax must know of a device that is not here."""
        raise NotImplementedError

    def described_devices(
        self, device: Device, hosts: int = 1, per_host: int = 1
    ) -> tuple[Any, ...]:
        """Described devices for XLA to compile for, host by host.

        Raises:
          UnknownDeviceError: the compiler for them is not installed.
        """
        raise NotImplementedError

    def temporary_bytes(self, stats: Any, constant_bytes: int) -> int:
        """Bytes of temporaries on the device.

        Args:
          stats: what `memory_analysis()` returns.
          constant_bytes: of large constants.
        """
        return stats.temp_size_in_bytes

    def options_for_absent(self, device: Device) -> Options:
        """Options with which XLA compiles for a device that is not here."""
        return {}

    def options_for_plan(self, flags: Options, limit_bytes: int, memory_bytes: int) -> Options:
        """Options with which XLA compiles a module that memplan plans.

        Args:
          flags: the other options.
          limit_bytes: the most that the module's data may take on the device.
          memory_bytes: of the device.
        """
        return {}

    def other_options(self, flags: Options, message: str, described: bool) -> Options | None:
        """Options that avoid a failure with this message; None if none do."""
        return None

    def explanation(self, message: str, device: Device) -> Exception | None:
        """memplan's error for a failure with this message; None if it is not known."""
        if any(words in message for words in _OFFLOAD_FAULTS):
            line = message.strip().partition("\n")[0]
            return UnsupportedProgramError(
                f"XLA of jaxlib {io.version_of('jaxlib')} cannot compile this step's values in "
                f"host memory ({line}); its host offloading has known bugs (openxla/xla#47362, "
                "#47380). Try host_budget=0, so that memplan keeps nothing on the host, or the "
                "step without host_state= or without its own `jax.device_put` to host memory."
            )
        return None

    def rematerializes_above(self, device: Device, resident_bytes: int) -> int:
        """Device bytes above which XLA rematerializes a step by itself.

        Args:
          resident_bytes: of the step's arguments and outputs.
        """
        raise NotImplementedError

    def rematerialization(
        self, device: Device, described: bool, limit_bytes: int, resident_bytes: int
    ) -> tuple[Device, Options]:
        """A device and options that set the limit of XLA's own rematerialization."""
        raise NotImplementedError


def topology_of(device: Device, kind: str, name: str, facts: Mapping[str, Any]) -> Any:
    """A description of devices that are not here.

    Args:
      kind: "GPU" or "TPU".
      name: of the topology.
      facts: what XLA must know besides.

    Raises:
      UnknownDeviceError: the compiler for them is not installed.
    """
    try:
        return topologies.get_topology_desc(name, device.backend.platform, **facts)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UnknownDeviceError(
            f"XLA cannot compile for {device.name} here ({error}). Planning for an absent {kind} "
            f"needs its compiler: pip install 'memplan[{kind.lower()}-aot]'."
        ) from error


def without_pass(flags: Options, name: str) -> dict[str, str]:
    """An option that disables a pass of XLA and those that the user disables.

    It repeats the user's passes, as an option of a compilation replaces the one in XLA_FLAGS.
    """
    if DISABLED_PASSES in flags:
        users = [flags[DISABLED_PASSES]]
    else:
        users = re.findall(rf"--{DISABLED_PASSES}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return {DISABLED_PASSES: ",".join([*users, name])}
