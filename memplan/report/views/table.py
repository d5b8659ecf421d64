"""Tables before anyone draws them, and what is written in them. `text` and `html` are the two that draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text."""

    title: str  # above it; '' for none
    columns: tuple[str, ...]  # headings; a leading '>' sets the column flush right
    rows: tuple[tuple[str, ...], ...]  # each as long as `columns`
    emphasis: tuple[str, ...] = ()  # what draws the eye in each row: `good`, `bad` or ''; empty for no emphasis at all

    def tone(self, row: int) -> str:
        return self.emphasis[row] if self.emphasis else ""


def heading(column: str) -> tuple[str, bool]:
    """The heading without its mark, and whether the column is set flush right."""
    return column.removeprefix(">"), column.startswith(">")


def shape(sides: Sequence[int], dtype: str) -> str:
    """`float32[64,112,112]`."""
    return f"{dtype}[{','.join(str(side) for side in sides)}]"


def short_source(source: str) -> str:
    """The last folder of a long `file:line`."""
    parts = source.split("/")
    return source if len(parts) <= 3 else "../" + "/".join(parts[-2:])


def largest(title: str, shown: int, total: int) -> str:
    """A title that owns up to rows left out."""
    return f"{title} ({total})" if shown == total else f"{title} (the largest {shown} of {total})"
