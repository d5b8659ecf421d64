"""Tables in markdown: columns are data, rows are what was measured; and the README that shows them."""

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
"""Name of a figure, or what makes it of a row; None is an empty cell."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    head: str
    value: Value
    shown: str = "{}"  # format of the figure
    unit: float = 1  # that it is divided by

    def cell(self, row: Row) -> str:
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if found is None:
            return ""
        return self.shown.format(found if self.unit == 1 else found / self.unit)


def mib(head: str, value: Value) -> Column:
    return Column(head, value, "{:.0f}", MIB)


def ms(head: str, value: Value, shown: str = "{:.1f}") -> Column:
    return Column(head, value, shown, 1e-3)


def table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    return grid([column.head for column in columns], ([column.cell(row) for column in columns] for row in rows))


def shown(*columns: Column, of: Callable[[Rows], Iterable[Row]] = list) -> Callable[[Rows], str]:
    """A view: of all rows, or of those chosen, a table."""
    return lambda rows: table(columns, of(rows))


def having(name: str) -> Callable[[Rows], Rows]:
    """The rows with such a figure."""
    return lambda rows: [row for row in rows if name in row]


def listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def regenerated(tables: Mapping[str, str], text: str) -> str:
    """README.md with the tables of every question by name."""
    for name, shown in tables.items():
        text = inserted(text, f"{shown}\n", name)
    return text


def rewrite(tables: Mapping[str, str]) -> None:
    write_atomic(README, regenerated(tables, README.read_text()))
