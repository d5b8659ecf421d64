"""Machines: the devices and topologies that can be planned for, and a device as measured.

Their JSON says of each what plans depend on, led by `"schema": "memplan.devices/1"`, `"memplan.topologies/1"` or
`"memplan.calibration/1"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from memplan import io
from memplan.hardware.device import Device
from memplan.hardware.measured import Spec
from memplan.hardware.topology import Topology
from memplan.report.result import Result
from memplan.report.views.table import Table
from memplan.units import UNKNOWN, format_bytes, format_flops, format_seconds


@dataclass(frozen=True)
class Devices(Result):
    """Every named device, and the host links that it can be put behind, as in `v100@pcie4x16`."""

    SCHEMA: ClassVar[str] = "memplan.devices/1"

    devices: tuple[Device, ...]
    links: tuple[str, ...]

    @property
    def title(self) -> str:
        return "memplan devices"

    def entries(self) -> dict[str, Any]:
        devices = [
            {
                "name": device.name,
                "description": device.description,
                "memory_bytes": device.memory_bytes,
                "memory_bandwidth": device.memory_bandwidth,
                "float32_flops": device.flops["float32"],
                "bfloat16_flops": device.flops["bfloat16"],
                "link": device.link.name,
                "link_bandwidth": device.link.bandwidth,
                "sources": device.sources,
            }
            for device in self.devices
        ]
        return io.encode({"devices": devices, "links": self.links})

    def tables(self, rows: int) -> tuple[Table, ...]:
        """All devices, whatever `rows` says, and the links."""
        columns = ("name", ">memory", ">GB/s", ">float32 TFLOP/s", ">bfloat16 TFLOP/s", ">link GB/s", "link", "product")
        listed = tuple(
            (
                device.name,
                format_bytes(device.memory_bytes),
                f"{device.memory_bandwidth / 1e9:,.0f}",
                f"{device.flops['float32'] / 1e12:,.1f}",
                f"{device.flops['bfloat16'] / 1e12:,.1f}",
                f"{device.link.bandwidth / 1e9:,.0f}",
                device.link.name,
                device.description,
            )
            for device in self.devices
        )
        links = (("behind another host link", "v100@pcie4x16"), ("links", ", ".join(self.links)))
        return Table("Devices", columns, listed), Table("", ("", ""), links)


@dataclass(frozen=True)
class Topologies(Result):
    """Topologies that can be planned for, or one that was measured."""

    SCHEMA: ClassVar[str] = "memplan.topologies/1"

    topologies: tuple[Topology, ...]

    @property
    def title(self) -> str:
        return "memplan topologies"

    def entries(self) -> dict[str, Any]:
        topologies = [
            {"name": one.name, "description": one.description, "levels": one.axes, "sources": one.sources}
            for one in self.topologies
        ]
        return io.encode({"topologies": topologies})

    def tables(self, rows: int) -> tuple[Table, ...]:
        """A row for each axis."""
        columns = ("topology", "axis", ">size", ">latency", ">GB/s", "a link for", "of")
        listed = tuple(
            (
                topology.name,
                axis.name,
                str(axis.size),
                format_seconds(axis.latency_s),
                f"{axis.bandwidth / 1e9:,.3g}",
                "each node" if axis.shared else "each device",
                topology.description,
            )
            for topology in self.topologies
            for axis in topology.axes
        )
        return (Table("Topologies", columns, listed),)


@dataclass(frozen=True)
class Calibration(Result):
    """A device as measured.

    Attributes:
      spec: the device, and the conditions it was measured under.
      assumed: by the names of measurements, what plans take where nothing is measured.
    """

    SCHEMA: ClassVar[str] = "memplan.calibration/1"

    spec: Spec
    assumed: Mapping[str, float]

    @property
    def title(self) -> str:
        return "memplan calibrate"

    def entries(self) -> dict[str, Any]:
        conditions = self.spec.conditions
        rates = [
            {
                "name": one.name,
                "unit": one.unit,
                "measured": one.value,
                "assumed": self.assumed.get(one.name),
                "spread": one.spread,
                "size": one.best.size,
                "note": one.note,
            }
            for one in conditions.measurements
        ]
        entries = {
            "device": self.spec.device.name,
            "hardware": conditions.hardware,
            "date": conditions.date,
            "load": conditions.load,
            "rates": rates,
            "versions": dict(conditions.versions),
        }
        return io.encode(entries)

    def tables(self, rows: int) -> tuple[Table, ...]:
        """All rates, whatever `rows` says, and the conditions."""
        conditions = self.spec.conditions
        rates = tuple(
            (
                one.name,
                _rate(one.value, one.unit),
                _rate(self.assumed[one.name], one.unit) if one.name in self.assumed else "-",
                f"{100 * one.spread:.0f} %",
                one.best.size,
                one.note,
            )
            for one in conditions.measurements
        )
        columns = ("", ">best", ">assumed", ">median over best", ">size", "how")
        listed = (
            ("measured on", f"{conditions.hardware}, {conditions.date}"),
            ("load before and after", ", ".join(f"{share:.1f}" for share in conditions.load) or UNKNOWN),
            ("versions", ", ".join(f"{name} {version}" for name, version in conditions.versions)),
        )
        return Table(self.spec.device.name, columns, rates), Table("", ("", ""), listed)


def _rate(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    return f"{format_flops(value)}/s" if unit == "FLOP/s" else f"{value / 1e9:,.1f} GB/s"
