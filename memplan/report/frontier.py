"""The largest size whose step fits, and the first size that does not.

The JSON is an object with the fields below, first `"schema": "memplan.frontier/2"`; see `memplan.report.model`.
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
    fits: bool  # a program within both budgets was found
    # device_bytes, host_bytes: of that program, or of the smallest one, by the compiler
    device_bytes: int
    host_bytes: int
    way: str  # how that program runs: `plain`, or the planner, and whether in slabs
    floor_bytes: int  # floor_bytes: no plan of this size needs less; `operation`: the operation that sets it
    operation: str
    compilations: int  # programs compiled for this size


@dataclass(frozen=True)
class Frontier(Record):
    """The largest size whose step fits.

    Attributes:
      name: of the size.
      largest: the largest size that fits.
      refused: the next size, which does not fit; None if the range ends before.
      tried: every size that was compiled, in that order.
      device: target of the compilation.
      budget_bytes, host_budget_bytes: limits of a step.
      versions: (name, version) of all software that affects the figures.

    Raises:
      ValueError: the largest size, or the refused one, was not tried.
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

    def __post_init__(self) -> None:
        tried = {one.size for one in self.tried}
        if not {self.largest} | ({self.refused} - {None}) <= tried:
            raise ValueError(f"{self.largest} or {self.refused} is none of the sizes tried")

    @property
    def compilations(self) -> int:
        """Seconds of all sizes together."""
        return sum(one.compilations for one in self.tried)

    def at(self, size: int) -> Trial:
        """The figures of a compiled size."""
        return next(one for one in self.tried if one.size == size)

    @property
    def limit(self) -> str:
        """Why the next size does not fit: one operation's working set exceeds the budget, or its plans do."""
        if self.refused is None:
            return "the range ends"
        known = self.at(self.refused)
        if known.floor_bytes > self.budget_bytes:
            return f"floor {format_bytes(known.floor_bytes)}, {known.operation}"
        if known.device_bytes > self.budget_bytes:
            return f"the next needs {format_bytes(known.device_bytes)}"
        return f"the next needs {format_bytes(known.host_bytes)} of the host"

    def tables(self, rows: int) -> tuple[Table, ...]:
        """The largest size and every compiled size, regardless of `rows`."""
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
