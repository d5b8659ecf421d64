"""Sheets as terminal tables."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memplan.report.views.table import Sheet, heading

WIDTH = 120

_STYLES = {"good": "green", "bad": "red", "": ""}


def table(sheet: Sheet) -> Table:
    """A rich table. Cells are taken literally: brackets in a name are not markup."""
    headings = [heading(column) for column in sheet.columns]
    drawn = Table(
        title=Text(sheet.title, style="bold") if sheet.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(name for name, _ in headings),
        pad_edge=False,
    )
    for name, right in headings:
        drawn.add_column(Text(name), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for index, row in enumerate(sheet.rows):
        drawn.add_row(*(Text(cell) for cell in row), style=_STYLES[sheet.tone(index)])
    return drawn


def plain(sheets: Iterable[Sheet]) -> str:
    """The sheets one below the other, without colour, `WIDTH` columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, legacy_windows=False, emoji=False, highlight=False)
    for sheet in sheets:
        console.print(table(sheet))
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())
