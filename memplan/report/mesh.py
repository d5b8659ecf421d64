"""The mesh of a step on several devices: its machine and its collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.report.views.table import Table
from memplan.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the machine.

    Attributes:
      name: of the level, for example `host`.
      size: nodes of it in one node of the level around it.
      bandwidth: bytes/s in each direction of one link.
      shared: all devices of a node have the link together.
    """

    name: str
    size: int
    bandwidth: float
    shared: bool


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind that cross the same levels.

    Attributes:
      kind: HLO's opcode.
      over: names of the levels that they cross, outermost first.
      count: in a step.
      outside_bytes: bytes that the busiest host sends to others in a step.
      inside_bytes: bytes that the busiest device sends to others of its host in a step.
      seconds: in a step, on idle links.
    """

    kind: str
    over: tuple[str, ...]
    count: int
    outside_bytes: int
    inside_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Mesh:
    """The machine and collectives of a step; all other figures of a report are one device's.

    Attributes:
      axes: (name, size) of the axes of the step's meshes.
      topology: its name.
      links: levels of the machine, outermost first.
      collectives: the longest first.
      collective_s: seconds of a step during which the links are busy.
      hidden_s: the part that compute hides.
      assumed: what of the machine nobody described, and as what; "" if all of it is described.
    """

    axes: tuple[tuple[str, int], ...]
    topology: str
    links: tuple[Link, ...]
    collectives: tuple[CollectiveRow, ...]
    collective_s: float
    hidden_s: float
    assumed: str = ""

    @property
    def outside_bytes(self) -> int:
        """Bytes that the busiest host sends to others in a step."""
        return sum(row.outside_bytes for row in self.collectives)

    @property
    def sizes(self) -> str:
        """`host 2, device 4`."""
        return ", ".join(f"{name} {size}" for name, size in self.axes)

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        """Rows of a report's first table."""
        hidden = self.hidden_s / self.collective_s if self.collective_s else 0.0
        links = ", ".join(
            f"{link.name} {link.size} at {link.bandwidth / 1e9:,.1f} GB/s" for link in self.links
        )
        assumed = (("  assumed", f"{self.assumed}; topology= describes others"),)
        return (
            ("mesh", f"{self.sizes}; figures are those of one device"),
            ("  machine", f"{self.topology}: {links}"),
            *(assumed if self.assumed else ()),
            (
                "  collectives",
                f"{format_seconds(self.collective_s)}, {hidden:.0%} under computation",
            ),
            ("  sent by a host", f"{format_bytes(self.outside_bytes)} in a step"),
        )


def collectives_table(rows: Sequence[CollectiveRow]) -> Table:
    """One row for each kind of collective and its levels; empty without collectives."""
    columns = ("collective", "over", ">times", ">sent by a host", ">by a device within", ">takes")
    table_rows = tuple(
        (
            row.kind,
            ", ".join(row.over),
            str(row.count),
            format_bytes(row.outside_bytes),
            format_bytes(row.inside_bytes),
            format_seconds(row.seconds),
        )
        for row in rows
    )
    return Table("Collectives of a step", columns, table_rows)
