"""A device whose rates were measured: the specification, the conditions it holds under, and its file.

The file is JSON: the fields of `Device` under their own names, `conditions`, and a format number. It appears whole or
not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memplan.errors import UnknownDeviceError
from memplan.hardware.device import Device, HostLink
from memplan.io import read_json, write_whole

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
        write_whole(path, self.to_json() + "\n")

    def to_json(self) -> str:
        document = {"format": FORMAT, **_plain(self.device), "conditions": _plain(self.conditions)}
        return json.dumps(document, indent=1, allow_nan=False)


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
        found = Spec(_read(Device, document, ""), _read(Conditions, document.get("conditions"), "conditions"))
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


def calibrated(base: Device, conditions: Conditions) -> Spec:
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


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotation `kind` says. Numbers are finite and not negative; all of a device are positive.

    Raises:
      ValueError: it is not; names the entry.
    """
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and types.NoneType in options:
        return None
    kind = options[0]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _record(typing.cast(type, kind), value, where)
    if origin is tuple and isinstance(value, list) and (inner[-1] is ... or len(value) == len(inner)):
        return tuple(_read(inner[0], entry, f"{where}[{number}]") for number, entry in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {name: _read(inner[1], entry, f"{where}.{name}") for name, entry in value.items()}
    if kind is str and isinstance(value, str):
        return value
    if (kind is float and type(value) in (int, float)) or (kind is int and type(value) is int):
        return _number(kind(typing.cast(float, value)), where)
    raise ValueError(f"its {where!r} is {str(value)[:40]!r}, not {_spelled(kind)}")


def _record(kind: type, document: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    entries: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = f"{where}.{field.name}".lstrip(".")
        if field.name not in document:
            raise ValueError(f"it has no entry {name!r}")
        entries[field.name] = _read(hints[field.name], document[field.name], name)
    return kind(**entries)


def _number(value: float, where: str) -> float:
    idle = where.startswith(("conditions.load", "target.compute_capability"))  # these may be zero
    if not math.isfinite(value) or value < 0 or (value == 0 and not idle):
        raise ValueError(f"its {where!r} is {value}, which no device has")
    return value


def _spelled(kind: Any) -> str:
    return {str: "text", int: "a whole number", float: "a number"}.get(kind, "what a specification has there")
