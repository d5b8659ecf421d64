"""One step under one budget, done in several ways: what each way takes.

Its JSON is an object with the fields below, led by `"schema": "memplan.comparison/1"`; see `memplan.report.model`.
"""

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.result import Record, Versions
from memplan.report.views.table import Table
from memplan.units import UNKNOWN, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the step."""

    name: str  # for example `plain jax`, `jax.checkpoint`, `memplan`
    device_bytes: int | None  # by the compiler; None where it gave up
    host_bytes: int | None  # by the compiler; None where it does not tell
    step_s: float | None  # predicted or measured seconds of one step; None where unknown
    fits: bool | None  # within the budget; None where that could not be found out
    note: str = ""  # what else is to be known, such as why it gave up


@dataclass(frozen=True)
class Comparison(Record):
    """Several ways to run one step.

    Attributes:
      rows: one for each way.
      device: what was compiled for.
      budget_bytes, host_budget_bytes: device and host bytes that a way may take; None where not given.
      versions: (name, version) of whatever changes the figures.
    """

    SCHEMA: ClassVar[str] = "memplan.comparison/1"
    TITLE: ClassVar[str] = "memplan compare"

    rows: tuple[Row, ...]
    device: str = ""
    budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    versions: Versions = ()

    @property
    def any_fits(self) -> bool:
        return any(row.fits for row in self.rows)

    def tables(self, rows: int) -> tuple[Table, ...]:
        """One row for each way, whatever `rows` says: green where it fits and red where it does not."""
        budget = f" in {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        place = f" on {self.device}" if self.device else ""
        words = {True: "yes", False: "no", None: UNKNOWN}
        tones = {True: "good", False: "bad", None: ""}
        ways = tuple(
            (
                row.name,
                format_bytes(row.device_bytes),
                format_bytes(row.host_bytes),
                format_seconds(row.step_s),
                words[row.fits],
                row.note,
            )
            for row in self.rows
        )
        columns = ("way", ">device", ">host", ">step", "fits", "note")
        return (Table(f"One step{place}{budget}", columns, ways, tuple(tones[row.fits] for row in self.rows)),)
