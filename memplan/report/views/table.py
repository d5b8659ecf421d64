"""Tables, drawn in a terminal or as a self-contained page."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

WIDTH = 120  # columns of plain text

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_STYLES = {"good": "green", "bad": "red", "": ""}
_PAGE_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color: #1d2530; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #aab2bd; }
td { border-bottom: 1px solid #e6e9ed; overflow-wrap: anywhere; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.good { color: #176b37; } .bad { color: #a3201c; }
@media (prefers-color-scheme: dark) {
  body { background: #14181d; color: #dde3ea; } td { border-color: #2b333c; }
  .good { color: #6fcf97; } .bad { color: #f28b82; }
}
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text."""

    title: str  # above the table; '' for none
    columns: tuple[str, ...]  # headings; a leading '>' right-aligns the column
    rows: tuple[tuple[str, ...], ...]  # each as long as `columns`
    emphasis: tuple[str, ...] = ()  # of each row: `good`, `bad` or ''; () for no emphasis

    @property
    def headings(self) -> list[tuple[str, bool]]:
        """The heading of each column, and whether it is right-aligned."""
        return [(column.removeprefix(">"), column.startswith(">")) for column in self.columns]

    @property
    def filled(self) -> "Table":
        """The table without the columns in which no row has anything."""
        columns = [
            number
            for number in range(len(self.columns))
            if not self.rows or any(row[number] not in ("", "-") for row in self.rows)
        ]
        return replace(
            self,
            columns=tuple(self.columns[number] for number in columns),
            rows=tuple(tuple(row[number] for number in columns) for row in self.rows),
        )

    @property
    def tones(self) -> tuple[str, ...]:
        """The emphasis of each row."""
        return self.emphasis or ("",) * len(self.rows)


def rich(table: Table) -> rich_table.Table:
    """The table for a terminal. Cells are literal: brackets are not markup."""
    table = table.filled
    drawing = rich_table.Table(
        title=Text(printable(table.title), style="bold") if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(name for name, _ in table.headings),
        pad_edge=False,
    )
    for name, right in table.headings:
        side = "right" if right else "left"
        drawing.add_column(Text(printable(name)), justify=side, no_wrap=right, overflow="fold")
    for row, tone in zip(table.rows, table.tones, strict=True):
        drawing.add_row(*(Text(printable(cell)) for cell in row), style=_STYLES[tone])
    return drawing


def printable(text: str) -> str:
    """Text of strangers without the control characters that a terminal obeys."""
    return text.translate(_CONTROLS)


def plain(tables: Iterable[Table]) -> str:
    """The tables as text, without colour, `WIDTH` columns wide."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=WIDTH,
        color_system=None,
        legacy_windows=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
    )
    for table in tables:
        console.print(rich(table))
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def page(title: str, tables: Iterable[Table]) -> str:
    """An HTML document without scripts or external resources; all text is escaped."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{html(tables)}\n</body>\n</html>\n"
    )


def html(tables: Iterable[Table]) -> str:
    """The tables as HTML, for a page."""
    return "\n".join(map(_html, tables))


def _html(table: Table) -> str:
    table = table.filled
    sides = [' class="right"' if right else "" for _, right in table.headings]

    def row(tag: str, cells: Iterable[str], tone: str) -> str:
        tone_class = f' class="{escape(tone)}"' if tone else ""
        pairs = zip(cells, sides, strict=True)
        text = "".join(f"<{tag}{side}>{escape(cell)}</{tag}>" for cell, side in pairs)
        return f"<tr{tone_class}>{text}</tr>\n"

    names = [name for name, _ in table.headings]
    title = f"<h2>{escape(table.title)}</h2>\n" if table.title else ""
    head = row("th", names, "") if any(names) else ""
    rows = "\n".join(
        row("td", cells, tone) for cells, tone in zip(table.rows, table.tones, strict=True)
    )
    return f'{title}<div class="wide"><table>\n{head}{rows}\n</table></div>'


def shape(sides: Sequence[int], dtype: str) -> str:
    """`float32[64,112,112]`."""
    return f"{dtype}[{','.join(map(str, sides))}]"


def short_source(source: str) -> str:
    """The last folder and file of a long `file:line`."""
    parts = source.split("/")
    return source if len(parts) <= 3 else "../" + "/".join(parts[-2:])


def largest(title: str, count: int, total: int) -> str:
    """A title with the number of omitted rows."""
    return f"{title} ({total})" if count == total else f"{title} (the largest {count} of {total})"
