"""The largest size whose step fits, with the first one that does not.

Its JSON is an object with the fields below, led by `"schema": "memplan.frontier/2"`; see `memplan.report.model`.
"""

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.result import Record, Versions
from memplan.report.views.table import Table
from memplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Trial:
    """A size that was compiled."""

    size: int
    fits: bool  # a program for it is within both budgets
    # device_bytes, host_bytes: of that program, or of the one that needs least, by the compiler
    device_bytes: int
    host_bytes: int
    way: str  # how that runs: `plain`, or the planner, and whether in slabs
    floor_bytes: int  # no plan of this size needs less; `operation`: which operation sets that
    operation: str
    compilations: int  # programs compiled for it


@dataclass(frozen=True)
class Frontier(Record):
    """The largest size whose step fits.

    Attributes:
      name: of the size.
      largest: the size that fits, while the next one does not.
      refused: that next size; None where the range ends before the budget does.
      tried: every size that was compiled, in that order.
      device: what was compiled for.
      budget_bytes, host_budget_bytes: what a step may take.
      versions: (name, version) of whatever changes the figures.
    """

    SCHEMA: ClassVar[str] = "memplan.frontier/2"
    TITLE: ClassVar[str] = "memplan largest"

    name: str
    largest: int
    refused: int | None
    tried: tuple[Trial, ...]
    device: str
    budget_bytes: int
    host_budget_bytes: int
    versions: Versions = ()

    @property
    def compilations(self) -> int:
        """Seconds of all sizes together."""
        return sum(one.compilations for one in self.tried)

    def at(self, size: int) -> Trial:
        """The figures of a compiled size."""
        return next(one for one in self.tried if one.size == size)

    @property
    def limit(self) -> str:
        """The obstacle to the next size: one operation whose working set is over the budget, or its plans."""
        if self.refused is None:
            return "the range ends"
        known = self.at(self.refused)
        if known.floor_bytes > self.budget_bytes:
            return f"floor {format_bytes(known.floor_bytes)}, {known.operation}"
        if known.device_bytes > self.budget_bytes:
            return f"the next needs {format_bytes(known.device_bytes)}"
        return f"the next needs {format_bytes(known.host_bytes)} of the host"

    def tables(self, rows: int) -> tuple[Table, ...]:
        """The largest size, and every size that was compiled, whatever `rows` says."""
        known = self.at(self.largest)
        first = (str(self.largest), format_bytes(known.device_bytes), format_bytes(known.host_bytes), self.limit)
        tried = tuple(
            (
                str(one.size),
                format_bytes(one.device_bytes),
                format_bytes(one.floor_bytes),
                one.way,
                str(one.compilations),
                "fits" if one.fits else "too large",
            )
            for one in self.tried
        )
        name = f">{self.name}"
        return (
            Table(
                f"The largest that fits {format_bytes(self.budget_bytes)} on {self.device}",
                (name, ">device", ">host", "limit"),
                (first,),
            ),
            Table(
                f"Sizes tried: {len(self.tried)}, in {self.compilations} programs",
                (name, ">device", ">floor", "way", ">programs", ""),
                tried,
                tuple("good" if one.fits else "bad" for one in self.tried),
            ),
        )
