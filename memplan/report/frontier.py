"""The largest sizes whose step fits, with the first ones that do not.

Its JSON is an object with the fields below, led by `"schema": "memplan.frontier/1"`; see `memplan.report.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.result import Record, Versions
from memplan.report.views.table import Table
from memplan.units import format_bytes

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A size that was compiled.

    Attributes:
      size: along each axis.
      fits: a program for it is within both budgets.
      device_bytes, host_bytes: of that program, or of the one that needs least, by the compiler.
      way: how that runs: `plain`, or the planner, and whether in slabs.
      floor_bytes: no plan of this size needs less; `operation`: which operation sets that.
      compilations: programs compiled for it.
    """

    size: Size
    fits: bool
    device_bytes: int
    host_bytes: int
    way: str
    floor_bytes: int
    operation: str
    compilations: int


@dataclass(frozen=True)
class Frontier(Record):
    """The largest size whose step fits; of two axes, for each value of the first the largest of the second.

    Attributes:
      axes: their names.
      largest: sizes that fit, while the next one along the last axis does not.
      refused: that next size; empty where the range ends before the budget does. As long as `largest`. Of two axes, it
        was not compiled where the row before refused as much.
      tried: every size that was compiled, in that order.
      traced: how many sizes were traced to find them.
      device: what was compiled for.
      budget_bytes, host_budget_bytes: what a step may take.
      versions: (name, version) of whatever changes the figures.
    """

    SCHEMA: ClassVar[str] = "memplan.frontier/1"

    axes: tuple[str, ...]
    largest: tuple[Size, ...]
    refused: tuple[Size, ...]
    tried: tuple[Trial, ...]
    traced: int
    device: str
    budget_bytes: int
    host_budget_bytes: int
    versions: Versions = ()

    @property
    def title(self) -> str:
        return "memplan largest"

    @property
    def compilations(self) -> int:
        """Of all sizes together."""
        return sum(one.compilations for one in self.tried)

    def at(self, wanted: Size) -> Trial | None:
        """What is known of a size."""
        return next((one for one in self.tried if one.size == wanted), None)

    def limit(self, refused: Size) -> str:
        """What keeps the step from that size: one operation whose working set is over the budget, or its plans."""
        known = self.at(refused)
        if known is None:
            return "as in the row above" if refused else "the range ends"
        if known.floor_bytes > self.budget_bytes:
            return f"floor {format_bytes(known.floor_bytes)}, {known.operation}"
        if known.device_bytes > self.budget_bytes:
            return f"the next needs {format_bytes(known.device_bytes)}"
        return f"the next needs {format_bytes(known.host_bytes)} of the host"

    def tables(self, rows: int) -> tuple[Table, ...]:
        """The frontier, and every size that was compiled, whatever `rows` says."""
        return _largest(self), _trials(self)


def _largest(found: Frontier) -> Table:
    rows = tuple(
        (
            *map(str, largest),
            *_bytes(found.at(largest)),
            found.limit(refused),
        )
        for largest, refused in zip(found.largest, found.refused, strict=True)
    )
    title = f"The largest that fits {format_bytes(found.budget_bytes)} on {found.device}"
    return Table(title, (*(f">{name}" for name in found.axes), ">device", ">host", "limit"), rows)


def _bytes(known: Trial | None) -> tuple[str, str]:
    return (format_bytes(known.device_bytes), format_bytes(known.host_bytes)) if known else ("", "")


def _trials(found: Frontier) -> Table:
    rows = tuple(
        (
            *map(str, one.size),
            format_bytes(one.device_bytes),
            format_bytes(one.floor_bytes),
            one.way,
            str(one.compilations),
            "fits" if one.fits else "too large",
        )
        for one in found.tried
    )
    title = f"Sizes tried: {found.traced} traced, {len(found.tried)} compiled, in {found.compilations} programs"
    columns = (*(f">{name}" for name in found.axes), ">device", ">floor", "way", ">programs", "")
    return Table(title, columns, rows, tuple("good" if one.fits else "bad" for one in found.tried))
