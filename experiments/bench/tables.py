"""Tables in markdown: columns are data, rows are what was measured; and the README that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.results import Row
from experiments.readme import grid, inserted
from memplan.io import write_atomic

README = Path(__file__).parent / "README.md"
MIB, MS = 2**20, 1e-3


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
      value: name of a figure, or what makes it of a row; None is an empty cell.
      shown: format of the figure.
      unit: that it is divided by.
    """

    head: str
    value: str | Callable[[Row], Any]
    shown: str = "{}"
    unit: float = 1

    def cell(self, row: Row) -> str:
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if found is None:
            return ""
        return self.shown.format(found if self.unit == 1 else found / self.unit)


def mib(head: str, value: str | Callable[[Row], Any]) -> Column:
    return Column(head, value, "{:.0f}", MIB)


def ms(head: str, value: str | Callable[[Row], Any], shown: str = "{:.1f}") -> Column:
    return Column(head, value, shown, MS)


def seconds(head: str, value: str | Callable[[Row], Any]) -> Column:
    return Column(head, value, "{:.1f}")


def table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    return grid([column.head for column in columns], ([column.cell(row) for column in columns] for row in rows))


def listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def regenerated(tables: Mapping[str, str], text: str) -> str:
    """README.md with the tables of every question by name."""
    for name, shown in tables.items():
        text = inserted(text, f"{shown}\n", name)
    return text


def rewrite(tables: Mapping[str, str]) -> None:
    write_atomic(README, regenerated(tables, README.read_text()))
