"""The largest size whose step fits, and the first size that does not.

The JSON is an object with the fields below, first `"schema": "memplan.frontier/2"`; see
`memplan.report.model`.
"""

from dataclasses import dataclass
from typing import ClassVar

from memplan.report.result import Record, Versions, incomplete
from memplan.report.views.table import Table
from memplan.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """A size that was explored, and compiled if its step was to be the largest."""

    size: int
    fits: bool  # a program within both budgets was found
    # of that program, or else of the smallest one; predicted if none was compiled
    device_bytes: int
    host_bytes: int  # likewise
    way: str  # `plain`, or the planner, and whether in slabs
    floor_bytes: int  # No plan of this size needs less.
    operation: str  # sets the floor
    compilations: int  # programs compiled for this size
    explorations: int = 0  # programs planned for this size, and not compiled
    step_s: float | None = None  # predicted seconds of that program's step
    unmodified_step_s: float | None = None  # of the step without a plan

    @property
    def verdict(self) -> str:
        """Whether it fits, and how that is known."""
        fits = "fits" if self.fits else "too large"
        return f"{fits}, {'compiled' if self.compilations else 'predicted'}"


@dataclass(frozen=True)
class Frontier(Record):
    """The largest size whose step fits.

    Attributes:
      name: of the size.
      largest: the largest size that fits; of an incomplete study, the largest of those tried.
      refused: the next size, which does not fit; None if the range ends before, and if the study is
        incomplete.
      tried: every size that was explored, in that order. The largest is compiled, unless the study
        is incomplete.
      device: target of the compilation.
      budget_bytes, host_budget_bytes: limits of a step.
      versions: (name, version) of all software that affects the figures.
      ended_by: what ended the study before it was complete, `time limit` or `Ctrl-C`; '' if nothing
        did.

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
    ended_by: str = ""

    def __post_init__(self) -> None:
        sizes = {trial.size for trial in self.tried}
        if not {self.largest} | ({self.refused} - {None}) <= sizes:
            raise ValueError(f"{self.largest} or {self.refused} is none of the sizes tried")

    @property
    def compilations(self) -> int:
        """Programs that were compiled for all sizes."""
        return sum(trial.compilations for trial in self.tried)

    @property
    def explorations(self) -> int:
        """Programs that were explored for all sizes, and not compiled."""
        return sum(trial.explorations for trial in self.tried)

    def at(self, size: int) -> Trial:
        """The figures of a size that was tried."""
        return next(trial for trial in self.tried if trial.size == size)

    @property
    def limit(self) -> str:
        """Why the next size does not fit: one operation exceeds the budget, or every plan does."""
        if self.ended_by:
            return f"not known: {self.ended_by} ended the search"
        if self.refused is None:
            return "the range ends"
        trial = self.at(self.refused)
        if trial.floor_bytes > self.budget_bytes:
            return f"floor {format_bytes(trial.floor_bytes)}, {trial.operation}"
        if trial.device_bytes > self.budget_bytes:
            return f"the next needs {format_bytes(trial.device_bytes)}"
        return f"the next needs {format_bytes(trial.host_bytes)} of the host"

    def tables(self, rows: int) -> tuple[Table, ...]:
        """The largest size and every size tried, regardless of `rows`."""
        programs = self.compilations + self.explorations
        trial = self.at(self.largest)
        row = (
            str(self.largest),
            format_bytes(trial.device_bytes),
            format_bytes(trial.host_bytes),
            format_seconds(trial.step_s),
            format_seconds(trial.unmodified_step_s),
            self.limit,
        )
        table_rows = tuple(
            (
                str(trial.size),
                format_bytes(trial.device_bytes),
                format_bytes(trial.floor_bytes),
                format_seconds(trial.step_s),
                trial.way,
                str(trial.compilations + trial.explorations),
                trial.verdict,
            )
            for trial in self.tried
        )
        name = f">{self.name}"
        return (
            Table(
                f"The largest that fits {format_bytes(self.budget_bytes)} on {self.device}",
                (name, ">device", ">host", ">step", ">unmodified", "limit"),
                (row,),
            ),
            Table(
                f"Sizes tried: {len(self.tried)}, in {programs} programs"
                f"{incomplete(self.ended_by)}",
                (name, ">device", ">floor", ">step", "way", ">programs", ""),
                table_rows,
                tuple("good" if trial.fits else "bad" for trial in self.tried),
            ),
        )
