"""One step under one budget, done in several ways: what each way takes.

Its JSON is an object with the fields below, led by `"schema": "memplan.comparison/1"`; see `memplan.report.model`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult

from memplan.report import document, html, text
from memplan.report.sheet import UNKNOWN, Sheet, seconds, size

SCHEMA = "memplan.comparison/1"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the step.

    Attributes:
      name: for example `plain jax`, `jax.checkpoint`, `memplan`.
      device_bytes: by the compiler; None where it gave up.
      host_bytes: by the compiler; None where it does not tell.
      step_s: predicted or measured seconds of one step; None where unknown.
      fits: within the budget; None where that could not be found out.
      note: what else is to be known, such as why it gave up.
    """

    name: str
    device_bytes: int | None
    host_bytes: int | None
    step_s: float | None
    fits: bool | None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Several ways to run one step.

    Attributes:
      rows: one for each way.
      device: what was compiled for.
      budget_bytes, host_budget_bytes: device and host bytes that a way may take; None where not given.
      versions: (name, version) of whatever changes the figures.
    """

    rows: tuple[Row, ...]
    device: str = ""
    budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    versions: document.Pairs = ()

    @property
    def any_fits(self) -> bool:
        return any(row.fits for row in self.rows)

    def __str__(self) -> str:
        """A plain text table, 120 columns."""
        return text.plain([sheet(self)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The same table for `rich.print`, as wide as the terminal."""
        yield text.table(sheet(self))

    def _repr_html_(self) -> str:
        return html.body([sheet(self)])

    def to_json(self) -> str:
        """Strict JSON, see the module's docstring; raises ValueError, naming the field, for NaN or infinity."""
        return document.to_json(self, SCHEMA)

    @classmethod
    def from_json(cls, written: str) -> Comparison:
        """The comparison that `to_json` wrote; raises ValueError, naming what is wrong, for anything else."""
        return document.from_json(cls, written, SCHEMA)

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json()`; the file appears whole or not at all (OSError)."""
        document.write_whole(path, self.to_json() + "\n")

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page; the file appears whole or not at all (OSError)."""
        document.write_whole(path, html.page("memplan compare", [sheet(self)]))


def sheet(comparison: Comparison) -> Sheet:
    """One row for each way, green where it fits and red where it does not."""
    budget = f" in {size(comparison.budget_bytes)}" if comparison.budget_bytes is not None else ""
    place = f" on {comparison.device}" if comparison.device else ""
    told = {True: "yes", False: "no", None: UNKNOWN}
    tones = {True: "good", False: "bad", None: ""}
    rows = tuple(
        (row.name, size(row.device_bytes), size(row.host_bytes), seconds(row.step_s), told[row.fits], row.note)
        for row in comparison.rows
    )
    columns = ("way", ">device", ">host", ">step", "fits", "note")
    return Sheet(f"One step{place}{budget}", columns, rows, tuple(tones[row.fits] for row in comparison.rows))
