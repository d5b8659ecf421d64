"""Step time against device memory: one step planned for many budgets, beside jax and XLA.

The JSON is an object with the fields below, first `"schema": "memplan.curve/1"`; see
`memplan.report.model`.
"""

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from memplan.io import write_atomic
from memplan.report.result import Record, Versions, incomplete
from memplan.report.views import pictures
from memplan.report.views.table import Table
from memplan.units import UNKNOWN, format_bytes, format_seconds

_GIB = 2**30

# Methods with a point for every budget.
MEMPLAN = "memplan"
XLA = "XLA's rematerialization"
BOUND = "lower bound"


@dataclass(frozen=True, slots=True)
class Point:
    """One method to run the step within one budget."""

    # The method: `memplan`, `XLA's rematerialization`, `lower bound` (no order of the kernels of
    # memplan's program is faster within the budget; its bytes are the budget), or a method without
    # a budget.
    way: str
    budget_bytes: int | None  # None for a method without a budget
    device_bytes: int | None  # see `measured`; None if nothing fits or it does not compile
    host_bytes: int | None  # likewise
    step_s: float | None  # predicted seconds of one step, from its kernels; None as above
    note: str = ""  # further information
    # `compiled`: the bytes are the compiler's. `predicted`: they are those of the module that XLA
    # scheduled, or that a plan makes of it; no code was generated.
    measured: Literal["compiled", "predicted"] = "compiled"


@dataclass(frozen=True)
class Curve(Record):
    """Step time against memory.

    Attributes:
      points: those of methods without a budget first, then by descending budget.
      device: target of the compilation.
      plain_bytes, plain_step_s: of the unmodified step.
      floor_bytes: no plan needs less.
      versions: (name, version) of all software that affects the figures.
      ended_by: what ended the study before it was complete, `time limit` or `Ctrl-C`; '' if nothing
        did.
    """

    SCHEMA: ClassVar[str] = "memplan.curve/1"
    TITLE: ClassVar[str] = "memplan curve"

    points: tuple[Point, ...]
    device: str
    plain_bytes: int
    plain_step_s: float | None
    floor_bytes: int
    versions: Versions = ()
    ended_by: str = ""

    def tables(self, rows: int) -> tuple[Table, ...]:
        """One row per point, regardless of `rows`."""
        table_rows = tuple(
            (
                point.way,
                format_bytes(point.budget_bytes) if point.budget_bytes is not None else "any",
                format_bytes(point.device_bytes),
                format_bytes(point.host_bytes),
                format_seconds(point.step_s),
                self.against_plain(point),
                point.note if point.step_s is None else point.measured,
            )
            for point in self.points
        )
        columns = ("way", ">budget", ">device", ">host", ">step", ">to plain", "")
        title = f"Step time against memory on {self.device}; floor {format_bytes(self.floor_bytes)}"
        title += incomplete(self.ended_by)
        return (Table(title, columns, table_rows, ("",) * len(table_rows)),)

    def against_plain(self, point: Point) -> str:
        """Relative time over the unmodified step, as `+3.1%`."""
        if point.step_s is None or not self.plain_step_s:
            return UNKNOWN
        return f"{point.step_s / self.plain_step_s - 1:+.1%}"

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve.

        Raises:
          ImportError: matplotlib, the extra `plots`, is not installed.
          OSError: the file cannot be written; nothing is left behind.
        """
        methods = dict.fromkeys(point.way for point in self.points)
        series = [series for series in map(self._series, methods) if series.points]
        axes = "device memory (GiB)", "step (ms)"
        floor = "floor", self.floor_bytes / _GIB
        write_atomic(path, pictures.png_of_series(self.device, axes, series, floor))

    def _series(self, method: str) -> pictures.Series:
        points = [point for point in self.points if point.way == method]
        coordinates = [
            (point.device_bytes / _GIB, 1e3 * point.step_s)
            for point in points
            if point.device_bytes is not None and point.step_s
        ]
        return pictures.Series(method, sorted(coordinates), points[0].budget_bytes is not None)
