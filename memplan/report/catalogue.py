"""The devices that can be planned for.

Its JSON is an object with the fields below, led by `"schema": "memplan.devices/1"`; see `memplan.report.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.result import Told
from memplan.report.views.table import Sheet, size


@dataclass(frozen=True, slots=True)
class Entry:
    """One device.

    Attributes:
      name, description: what it answers to, and the product.
      memory_bytes: of the device.
      memory_bandwidth: bytes/s of that memory.
      float32_flops, bfloat16_flops: peak FLOP/s of matrix products.
      link: the path to host memory.
      link_bandwidth: bytes/s in each direction.
      sources: where the figures come from.
    """

    name: str
    description: str
    memory_bytes: int
    memory_bandwidth: float
    float32_flops: float
    bfloat16_flops: float
    link: str
    link_bandwidth: float
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Catalogue(Told):
    """Every named device.

    Attributes:
      devices: one entry for each.
      links: host links that a device can be put behind, as in `v100@pcie4x16`.
    """

    SCHEMA: ClassVar[str] = "memplan.devices/1"

    devices: tuple[Entry, ...]
    links: tuple[str, ...]

    @property
    def title(self) -> str:
        return "memplan devices"

    def sheets(self, rows: int) -> tuple[Sheet, ...]:
        """All devices, whatever `rows` says, and the links."""
        columns = ("name", ">memory", ">GB/s", ">float32 TFLOP/s", ">bfloat16 TFLOP/s", ">link GB/s", "link", "product")
        listed = tuple(
            (
                device.name,
                size(device.memory_bytes),
                f"{device.memory_bandwidth / 1e9:,.0f}",
                f"{device.float32_flops / 1e12:,.1f}",
                f"{device.bfloat16_flops / 1e12:,.1f}",
                f"{device.link_bandwidth / 1e9:,.0f}",
                device.link,
                device.description,
            )
            for device in self.devices
        )
        links = (("behind another host link", "v100@pcie4x16"), ("links", ", ".join(self.links)))
        return Sheet("Devices", columns, listed), Sheet("", ("", ""), links)
