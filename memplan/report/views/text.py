"""Tables as terminal tables."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from memplan.report.views.table import Table, heading

WIDTH = 120

_STYLES = {"good": "green", "bad": "red", "": ""}


def render(table: Table) -> rich_table.Table:
    """A rich table. Cells are taken literally: brackets in a name are not markup."""
    headings = [heading(column) for column in table.columns]
    drawn = rich_table.Table(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(name for name, _ in headings),
        pad_edge=False,
    )
    for name, right in headings:
        drawn.add_column(Text(name), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for index, row in enumerate(table.rows):
        drawn.add_row(*(Text(cell) for cell in row), style=_STYLES[table.tone(index)])
    return drawn


def plain(tables: Iterable[Table]) -> str:
    """The tables one below the other, without colour, `WIDTH` columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, legacy_windows=False, emoji=False, highlight=False)
    for table in tables:
        console.print(render(table))
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())
