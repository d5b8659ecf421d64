"""Machines: devices and topologies to plan for, and a measured device.

The JSON has the figures that plans depend on, first `"schema": "memplan.devices/1"`,
`"memplan.topologies/1"` or `"memplan.calibration/2"`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from memplan import io
from memplan.hardware.device import Device
from memplan.hardware.topology import Topology
from memplan.report.result import Result
from memplan.report.views.table import Table
from memplan.units import format_bytes, format_flops, format_seconds


@dataclass(frozen=True)
class Devices(Result):
    """Every named device, and the host links to combine it with, as in `v100@pcie4x16`."""

    SCHEMA: ClassVar[str] = "memplan.devices/1"
    TITLE: ClassVar[str] = "memplan devices"

    devices: tuple[Device, ...]
    links: tuple[str, ...]

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
        """All devices, regardless of `rows`, and the links."""
        columns = (
            "name",
            ">memory",
            ">GB/s",
            ">float32 TFLOP/s",
            ">bfloat16 TFLOP/s",
            ">link GB/s",
            "link",
            "product",
        )
        table_rows = tuple(
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
        return Table("Devices", columns, table_rows), Table("", ("", ""), links)


@dataclass(frozen=True)
class Topologies(Result):
    """The topologies that memplan can plan for, or a measured one."""

    SCHEMA: ClassVar[str] = "memplan.topologies/1"
    TITLE: ClassVar[str] = "memplan topologies"

    topologies: tuple[Topology, ...]

    def entries(self) -> dict[str, Any]:
        topologies = [
            {
                "name": topology.name,
                "description": topology.description,
                "levels": topology.axes,
                "sources": topology.sources,
            }
            for topology in self.topologies
        ]
        return io.encode({"topologies": topologies})

    def tables(self, rows: int) -> tuple[Table, ...]:
        """One row per axis."""
        columns = ("topology", "axis", ">size", ">latency", ">GB/s", "a link for", "of")
        table_rows = tuple(
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
        return (Table("Topologies", columns, table_rows),)


@dataclass(frozen=True)
class Calibration(Result):
    """A measured device."""

    SCHEMA: ClassVar[str] = "memplan.calibration/2"
    TITLE: ClassVar[str] = "memplan calibrate"

    device: Device
    measured: Mapping[str, float]  # measured rates by name, which ends with the unit
    assumed: Mapping[str, float]  # rates that plans use without measurements

    def entries(self) -> dict[str, Any]:
        return io.encode(
            {
                "device": self.device.name,
                "sources": self.device.sources,
                "measured": self.measured,
                "assumed": self.assumed,
                "seconds_error": self.device.efficiency.error,
            }
        )

    def tables(self, rows: int) -> tuple[Table, ...]:
        """All rates, regardless of `rows`, and where they were measured."""
        rates = tuple(
            (name.rpartition(", ")[0], _rate(name, value), _rate(name, self.assumed[name]))
            for name, value in self.measured.items()
        )
        sources = tuple(("", source) for source in self.device.sources)
        if self.device.efficiency.error is not None:
            certainty = "of operations that no rate was fitted to: off by at most"
            sources += (("", f"Predicted seconds {certainty} {self.device.efficiency.error:.0%}."),)
        return Table(self.device.name, ("", ">measured", ">assumed"), rates), Table(
            "", ("", ""), sources
        )


def _rate(name: str, value: float) -> str:
    match name.rpartition(", ")[2]:
        case "s":
            return format_seconds(value)
        case "FLOP/s":
            return f"{format_flops(value)}/s"
        case _:
            return f"{value / 1e9:,.1f} GB/s"
