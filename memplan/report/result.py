"""Base classes of results: print tables, save JSON and pages; records also load."""

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from rich.console import Console, ConsoleOptions, RenderResult

from memplan import io
from memplan.errors import ReportError
from memplan.io import write_atomic
from memplan.report import document
from memplan.report.views import table
from memplan.report.views.table import Table

Versions = tuple[tuple[str, str], ...]
"""((package, version), ...) of all software that affects the figures."""

# Rows of long tables.
_TEXT_ROWS = 12
_NOTEBOOK_ROWS = 50
_PAGE_ROWS = 500


class Result(ABC):
    """Base of reported dataclasses; `SCHEMA` names and versions their JSON."""

    SCHEMA: ClassVar[str]
    TITLE: ClassVar[str]  # of the page, if all results have the same

    @abstractmethod
    def tables(self, rows: int) -> tuple[Table, ...]:
        """The tables to draw; at most `rows` rows of long ones."""

    @property
    def title(self) -> str:
        """Heading of the page."""
        return self.TITLE

    @abstractmethod
    def entries(self) -> dict[str, Any]:
        """The entries of the JSON: dicts, lists and scalars."""

    def __str__(self) -> str:
        """Plain text tables, 120 columns."""
        return table.plain(self.tables(_TEXT_ROWS))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The same tables for `rich.print`, in the terminal's width."""
        yield from map(table.rich, self.tables(_TEXT_ROWS))

    def _repr_html_(self) -> str:
        return table.html(self.tables(_NOTEBOOK_ROWS))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the tables in IPython, and in notebooks that show no HTML."""
        printer.text(str(self))

    def to_json(self) -> str:
        """Strict JSON: the fields under their own names, tuples as arrays, unknown values as null.

        Raises:
          ValueError: a number is NaN or infinite; names the field.
        """
        return document.write(self.entries(), self.SCHEMA)

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json()`, atomically (OSError)."""
        write_atomic(path, self.to_json() + "\n")

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page, atomically (OSError)."""
        write_atomic(path, self.to_html())

    def to_html(self) -> str:
        """The page that `save_html` writes."""
        return table.page(self.title, self.tables(_PAGE_ROWS))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a study.

    Attributes:
      result: the study with the rows that were done until then; its `ended_by` is `Ctrl-C`.
    """

    def __init__(self, result: Result):
        super().__init__("Ctrl-C ended the study; `result` has the rows that are done")
        self.result = result


def incomplete(ended_by: str) -> str:
    """`, incomplete: the time limit ended it`, for a title; "" for a complete result."""
    return f", incomplete: {ended_by} ended it" if ended_by else ""


class Record(Result):
    """A result whose JSON has its fields, `versions` as an object, and can be loaded."""

    versions: Versions

    def entries(self) -> dict[str, Any]:
        return {**io.encode(self), "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, written: str) -> Self:
        """Read the JSON that `to_json` wrote.

        Raises:
          ReportError: it is no such JSON; names the fault.
        """
        try:
            entries = document.read(written, cls.SCHEMA)
        except ValueError as error:
            raise ReportError(str(error)) from error
        versions = entries.get("versions")
        if isinstance(versions, dict):
            entries["versions"] = [list(pair) for pair in versions.items()]
        try:
            return io.decode(cls, entries)
        except ValueError as error:
            raise ReportError(
                f"This document is damaged ({error!s:.300}): it was truncated or edited. Write it "
                "again."
            ) from error

    @classmethod
    def load_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read the file that `save_json` wrote.

        Raises:
          ReportError: it is no such file; names the path and the fault.
        """
        try:
            return cls.from_json(io.read_text(path))
        except OSError as error:
            raise ReportError(f"{path} cannot be read: {error.strerror or error}.") from error
        except ReportError as error:
            raise ReportError(f"{path} holds no report. {error}") from error
        except ValueError as error:
            raise ReportError(f"{path} holds no report: {error}.") from error
