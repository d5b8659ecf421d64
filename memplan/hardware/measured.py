"""A device whose rates were measured, and its file.

The file is JSON with the fields of `Device` and of `MeasuredDevice`.
"""

import json
import os
from dataclasses import dataclass

from memplan import io
from memplan.errors import UnknownDeviceError
from memplan.hardware.device import Device
from memplan.io import read_json, write_atomic

FORMAT = 4  # 3 had no kernels, 2 no efficiency
# Entries of a device that may be 0.
_MAY_BE_ZERO = (
    "target.compute_capability",
    "efficiency.kernel_s",
    "efficiency.matrix_units.convolution_exponent",
    "efficiency.matrix_units.filter_exponent",
    "efficiency.cores.convolution_exponent",
    "efficiency.cores.filter_exponent",
    "efficiency.volume_copies",
    "efficiency.error",
)


@dataclass(frozen=True)
class MeasuredDevice:
    """A device, and where its rates were measured."""

    device: Device
    platform: str  # jax's name of the backend, `cpu` or `gpu`
    device_kind: str  # the driver's name of the device

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`; the file appears whole or not at all (OSError)."""
        origin = {"platform": self.platform, "device_kind": self.device_kind}
        document = {"format": FORMAT, **origin, **io.encode(self.device)}
        write_atomic(path, json.dumps(document, indent=1) + "\n")


def is_path(device: str) -> bool:
    """Is a device named by its file?

    Such a name ends in `.json` or contains a folder. No name of a device does.
    """
    return device.lower().endswith(".json") or "/" in device or os.sep in device


def load(path: str | os.PathLike[str]) -> MeasuredDevice:
    """Read a saved device.

    Raises:
      UnknownDeviceError: there is no such file, or it does not hold a complete device. The error
        says what is wrong.
    """
    try:
        document = read_json(path, FORMAT)
        origin = {name: document.pop(name, None) for name in ("platform", "device_kind")}
        for name, value in origin.items():
            if not isinstance(value, str):
                raise ValueError(f"its {name!r} is {value!r:.40}, not text")
        device = io.decode(Device, document, complete=True)
        if "float32" not in device.flops:
            raise ValueError("its 'flops' have no entry 'float32'")
        if device.target is None and origin["platform"] != "cpu":
            raise ValueError("its 'target' is null, but XLA needs one to compile for")
        for name, value in io.scalars(io.encode(device)):
            may_be_zero = name.startswith(_MAY_BE_ZERO)
            if isinstance(value, (int, float)) and not (value > 0 or (value == 0 and may_be_zero)):
                raise ValueError(f"its {name!r} is {value}, which is not possible")
    except OSError as error:
        raise UnknownDeviceError(
            f"the device file {os.fspath(path)!r} cannot be read: {error.strerror or error}. "
            "`memplan calibrate --out PATH` writes one; `memplan devices` lists the devices known "
            "by name."
        ) from error
    except ValueError as error:
        raise UnknownDeviceError(
            f"{os.fspath(path)!r} is not a complete device file ({error!s:.300}). It may be "
            "truncated, or from another program or release; write it again with "
            "`memplan calibrate --out PATH`."
        ) from error
    return MeasuredDevice(device, origin["platform"], origin["device_kind"])
