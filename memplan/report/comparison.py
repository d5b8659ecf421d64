"""Compares several methods of running one step within one budget.

The JSON is an object with the fields below, first `"schema": "memplan.comparison/1"`; see
`memplan.report.model`.
"""

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.result import Record, Versions, incomplete
from memplan.report.views.table import Table
from memplan.units import UNKNOWN, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One method to run the step."""

    name: str  # for example `plain jax`, `jax.checkpoint`, `memplan`
    device_bytes: int | None  # by the compiler, or as the note says; None if it failed
    host_bytes: int | None  # by the compiler; None if it does not report them
    step_s: float | None  # predicted or measured seconds of one step; None if unknown
    fits: bool | None  # within the budget; None if unknown
    note: str = ""  # further information, such as why it failed


@dataclass(frozen=True)
class Comparison(Record):
    """Several methods to run one step.

    Attributes:
      rows: one per method.
      device: target of the compilation.
      budget_bytes, host_budget_bytes: limits of device and host bytes; None if not given.
      versions: (name, version) of all software that affects the figures.
      seconds_error: the share by which predicted seconds may be off on the device; None if that is
        not known. Steps within it of the fastest that fits are a tie.
      ended_by: what ended the study before it was complete, `time limit` or `Ctrl-C`; '' if nothing
        did.
    """

    SCHEMA: ClassVar[str] = "memplan.comparison/1"
    TITLE: ClassVar[str] = "memplan compare"

    rows: tuple[Row, ...]
    device: str = ""
    budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    versions: Versions = ()
    seconds_error: float | None = None
    ended_by: str = ""

    @property
    def any_fits(self) -> bool:
        return any(row.fits for row in self.rows)

    def ties(self, row: Row) -> bool:
        """Does it fit, and do its seconds not tell it from the fastest that fits?"""
        steps_s = [other.step_s for other in self.rows if other.fits and other.step_s]
        if self.seconds_error is None or len(steps_s) < 2 or not (row.fits and row.step_s):
            return False
        return row.step_s <= (1 + self.seconds_error) * min(steps_s)

    def _note(self, row: Row) -> str:
        if not self.ties(row):
            return row.note
        tie = f"a tie for the fastest: seconds may be off by {self.seconds_error:.0%}"
        return f"{row.note}; {tie}" if row.note else tie

    def tables(self, rows: int) -> tuple[Table, ...]:
        """One row per method, regardless of `rows`: green if it fits and red if it does not."""
        budget = f" in {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        device = f" on {self.device}" if self.device else ""
        words = {True: "yes", False: "no", None: UNKNOWN}
        tones = {True: "good", False: "bad", None: ""}
        table_rows = tuple(
            (
                row.name,
                format_bytes(row.device_bytes),
                format_bytes(row.host_bytes),
                format_seconds(row.step_s),
                words[row.fits],
                self._note(row),
            )
            for row in self.rows
        )
        columns = ("way", ">device", ">host", ">step", "fits", "note")
        emphasis = tuple(tones[row.fits] for row in self.rows)
        title = f"One step{device}{budget}{incomplete(self.ended_by)}"
        return (Table(title, columns, table_rows, emphasis),)
