"""Step time against device memory: one step planned for many budgets, compared with jax and XLA without a plan.

The JSON is an object with the fields below, first `"schema": "memplan.curve/1"`; see `memplan.report.model`.
"""

import os
from dataclasses import dataclass
from typing import ClassVar

from memplan.io import write_atomic
from memplan.report.result import Record, Versions
from memplan.report.views import pictures
from memplan.report.views.table import Table
from memplan.units import UNKNOWN, format_bytes, format_seconds

_GIB = 2**30

MEMPLAN, XLA, BOUND = "memplan", "XLA's rematerialization", "lower bound"  # methods with a point for every budget


@dataclass(frozen=True, slots=True)
class Point:
    """One method to run the step within one budget."""

    # `memplan`, `XLA's rematerialization`, `lower bound` (no plan within the budget is faster; its bytes are the
    # budget), or a method without a budget
    way: str
    budget_bytes: int | None  # None for a method without a budget
    # device_bytes, host_bytes: by the compiler; None if nothing fits or it does not compile
    device_bytes: int | None
    host_bytes: int | None
    step_s: float | None  # predicted seconds of one step, from the compiled program; None as above
    note: str = ""  # further information


@dataclass(frozen=True)
class Curve(Record):
    """Step time against memory.

    Attributes:
      points: those of methods without a budget first, then by descending budget.
      device: target of the compilation.
      plain_bytes, plain_step_s: of the unmodified step.
      floor_bytes: no plan needs less.
      versions: (name, version) of all software that affects the figures.
    """

    SCHEMA: ClassVar[str] = "memplan.curve/1"
    TITLE: ClassVar[str] = "memplan curve"

    points: tuple[Point, ...]
    device: str
    plain_bytes: int
    plain_step_s: float | None
    floor_bytes: int
    versions: Versions = ()

    def tables(self, rows: int) -> tuple[Table, ...]:
        """One row per point, regardless of `rows`."""
        listed = tuple(
            (
                point.way,
                format_bytes(point.budget_bytes) if point.budget_bytes is not None else "any",
                format_bytes(point.device_bytes),
                format_bytes(point.host_bytes),
                format_seconds(point.step_s),
                self.against_plain(point),
                point.note,
            )
            for point in self.points
        )
        columns = ("way", ">budget", ">device", ">host", ">step", ">to plain", "note")
        title = f"Step time against memory on {self.device}; floor {format_bytes(self.floor_bytes)}"
        return (Table(title, columns, listed, ("",) * len(listed)),)

    def against_plain(self, point: Point) -> str:
        """Relative time over the unmodified step, as `+3.1%`."""
        if point.step_s is None or not self.plain_step_s:
            return UNKNOWN
        return f"{point.step_s / self.plain_step_s - 1:+.1%}"

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw it.

        Raises:
          ImportError: matplotlib, the extra `plots`, is not installed.
          OSError: the file cannot be written; nothing is left behind.
        """
        ways = dict.fromkeys(point.way for point in self.points)
        series = [found for way in ways if (found := self._series(way)).points]
        axes = "device memory (GiB)", "step (ms)"
        write_atomic(path, pictures.png_of_series(self.device, axes, series, ("floor", self.floor_bytes / _GIB)))

    def _series(self, way: str) -> pictures.Series:
        points = [point for point in self.points if point.way == way]
        known = [(p.device_bytes / _GIB, 1e3 * p.step_s) for p in points if p.device_bytes is not None and p.step_s]
        return pictures.Series(way, sorted(known), points[0].budget_bytes is not None)
