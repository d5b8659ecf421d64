"""A device whose rates were measured: the specification, the conditions it holds under, and its file.

The file is JSON: the fields of `Device` under their own names, `conditions`, and a format number. It appears whole or
not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from memplan import io
from memplan.errors import UnknownDeviceError
from memplan.hardware.device import Device, HostLink
from memplan.io import read_json, write_atomic

FORMAT = 1

# Names of measurements that a specification is made of; others only stand in its conditions.
MATRIX = "matrix product {}"
ELEMENTWISE = "elementwise float32"
MEMORY = "device memory"
TO_HOST, TO_DEVICE, BOTH_WAYS = "device to host", "host to device", "both directions at once, each"
LATENCY = "latency of a small copy"


@dataclass(frozen=True, slots=True)
class Timing:
    """Several runs at one size.

    Attributes:
      size: as a person writes it.
      work: FLOPs or bytes of one run.
      best_s, median_s, worst_s: seconds of one run.
    """

    size: str
    work: float
    best_s: float
    median_s: float
    worst_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One rate, or one latency.

    Attributes:
      name: of what.
      unit: `FLOP/s`, `bytes/s` or `s`.
      runs: at each size.
      timings: by size; at least one.
      note: how it was measured, where the name does not say it.
    """

    name: str
    unit: str
    runs: int
    timings: tuple[Timing, ...]
    note: str = ""

    @property
    def best(self) -> Timing:
        """The size at which it went fastest."""
        if self.unit == "s":
            return min(self.timings, key=lambda timing: timing.best_s)
        return max(self.timings, key=lambda timing: timing.work / timing.best_s)

    @property
    def value(self) -> float:
        """In `unit`: the best run at the best size."""
        return self.best.best_s if self.unit == "s" else self.best.work / self.best.best_s

    @property
    def spread(self) -> float:
        """How much longer than the best run the median one took, as a share, at the best size."""
        return self.best.median_s / self.best.best_s - 1


@dataclass(frozen=True)
class Conditions:
    """What was measured, when and with what.

    Attributes:
      platform: jax's name of the backend, `cpu` or `gpu`.
      device_kind: the driver's name of the device.
      hardware: for people: processor, cores.
      load: processes that competed for the processor meanwhile, averaged over a minute, before and after.
      versions: ((package, version), ...).
      date: ISO 8601, UTC.
      measurements: everything that was timed.
    """

    platform: str
    device_kind: str
    hardware: str
    load: tuple[float, ...]
    versions: tuple[tuple[str, str], ...]
    date: str
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True)
class Spec:
    """A measured device."""

    device: Device
    conditions: Conditions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`; the file appears whole or not at all (OSError)."""
        write_atomic(path, self.to_json() + "\n")

    def to_json(self) -> str:
        document = {"format": FORMAT, **io.encode(self.device), "conditions": io.encode(self.conditions)}
        return json.dumps(document, indent=1)


def is_path(device: str) -> bool:
    """True where a device is given as a file: it ends in `.json` or names a folder. No device's name does."""
    return device.lower().endswith(".json") or "/" in device or os.sep in device


def load(path: str | os.PathLike[str]) -> Spec:
    """Read a saved specification.

    Raises:
      UnknownDeviceError: there is no such file, or it is not a whole specification; says what is wrong with it.
    """
    try:
        document = read_json(path, FORMAT)
        conditions = io.decode(Conditions, document.get("conditions"), "conditions", complete=True)
        found = Spec(io.decode(Device, document, complete=True), conditions)
        _check_numbers(found)
        if "float32" not in found.device.flops:
            raise ValueError("its 'flops' have no entry 'float32'")
        if not all(measurement.timings for measurement in found.conditions.measurements):
            raise ValueError("one of its measurements has no timings")
    except OSError as error:
        raise UnknownDeviceError(
            f"the device specification {os.fspath(path)!r} cannot be read: {error.strerror or error}. "
            "`memplan calibrate --out PATH` writes one; `memplan devices` lists the devices known by name."
        ) from error
    except (ValueError, OverflowError, RecursionError) as error:  # ValueError: not JSON, not even text
        raise UnknownDeviceError(
            f"{os.fspath(path)!r} is not a whole device specification ({error}). It may be truncated or written by "
            "another program; write it again with `memplan calibrate --out PATH`."
        ) from error
    return found


def calibrate(base: Device, conditions: Conditions) -> Spec:
    """`base` with what was measured in the place of what was assumed.

    A matrix rate that was not measured keeps its ratio to float32's. The link gets the slower direction, as a value
    that leaves also comes back.
    """
    measured = {found.name: found.value for found in conditions.measurements}
    given = {dtype: measured[MATRIX.format(dtype)] for dtype in base.flops if MATRIX.format(dtype) in measured}
    scale = given.get("float32", base.flops["float32"]) / base.flops["float32"]
    scaled = ", ".join(sorted(set(base.flops) - set(given)))
    device = replace(
        base,
        name=f"{base.name}-measured",
        description=f"{base.description}, measured",
        memory_bandwidth=measured.get(MEMORY, base.memory_bandwidth),
        flops={dtype: given.get(dtype, rate * scale) for dtype, rate in base.flops.items()},
        vector_flops=measured.get(ELEMENTWISE, base.vector_flops),
        link=_link(base.link, measured, conditions),
        sources=(
            f"Measured on {conditions.date[:10]}, {conditions.hardware}: see conditions",
            *((f"Not measured, {base.name}'s ratio to float32 kept: {scaled}",) if scaled else ()),
        ),
    )
    return Spec(device, conditions)


def _link(base: HostLink, measured: Mapping[str, float], conditions: Conditions) -> HostLink:
    if not {TO_HOST, TO_DEVICE, LATENCY} <= set(measured):
        return base
    what = "a memory copy, host memory being device memory" if conditions.platform == "cpu" else "the slower direction"
    return HostLink(
        name=f"{base.name}-measured",
        bandwidth=min(measured[TO_HOST], measured[TO_DEVICE]),
        latency_s=measured[LATENCY],
        source=f"Measured on {conditions.date[:10]}: {what}. The latency includes issuing the copy from Python.",
    )


def _check_numbers(found: Spec) -> None:
    """Raise ValueError, naming the entry, unless all are finite and positive; some may be zero."""
    entries = (*io.scalars(io.encode(found.device)), *io.scalars(io.encode(found.conditions), "conditions"))
    for where, value in entries:
        idle = where.startswith(("conditions.load", "target.compute_capability"))
        if isinstance(value, (int, float)) and not (0 < value < math.inf or (value == 0 and idle)):
            raise ValueError(f"its {where!r} is {value}, which no device has")
