"""Markdown tables from columns as data and measured rows, and the README that shows them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.results import Row
from experiments.readme import grid, inserted
from memplan.io import write_atomic

README = Path(__file__).parent / "README.md"
MIB = 2**20
Rows = list[Row]
Value = str | Callable[[Row], Any]
"""Name of a figure, or a function of a row; None gives an empty cell."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    head: str
    value: Value
    shown: str = "{}"  # format of the figure
    unit: float = 1  # what the figure is divided by

    def cell(self, row: Row) -> str:
        figure = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if figure is None:
            return ""
        return self.shown.format(figure if self.unit == 1 else figure / self.unit)


def mib(head: str, value: Value) -> Column:
    return Column(head, value, "{:.0f}", MIB)


def ms(head: str, value: Value, shown: str = "{:.1f}") -> Column:
    return Column(head, value, shown, 1e-3)


def table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    return grid(
        [column.head for column in columns],
        ([column.cell(row) for column in columns] for row in rows),
    )


def shown(*columns: Column, of: Callable[[Rows], Iterable[Row]] = list) -> Callable[[Rows], str]:
    """A view: a table of the rows that `of` selects, by default all."""
    return lambda rows: table(columns, of(rows))


def having(name: str) -> Callable[[Rows], Rows]:
    """Selects the rows with a figure of this name."""
    return lambda rows: [row for row in rows if name in row]


def listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def regenerated(tables: Mapping[str, str], text: str) -> str:
    """The text of README.md with every question's tables replaced."""
    for name, shown in tables.items():
        text = inserted(text, f"{shown}\n", name)
    return text


def rewrite(tables: Mapping[str, str]) -> None:
    write_atomic(README, regenerated(tables, README.read_text()))
