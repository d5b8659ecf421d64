"""Tables as one self-contained page: no scripts, nothing loaded, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from memplan.report.views.table import Table, heading

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1d2530; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #aab2bd; } td { border-bottom: 1px solid #e6e9ed; overflow-wrap: anywhere; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.good { color: #176b37; } .bad { color: #a3201c; }
@media (prefers-color-scheme: dark) {
  body { background: #14181d; color: #dde3ea; } td { border-color: #2b333c; }
  .good { color: #6fcf97; } .bad { color: #f28b82; }
}
"""


def page(title: str, tables: Iterable[Table]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body(tables)}\n</body>\n</html>\n"
    )


def body(tables: Iterable[Table]) -> str:
    """The tables alone, for a page of someone else's."""
    return "\n".join(_table(table) for table in tables)


def _table(table: Table) -> str:
    sides = [' class="right"' if right else "" for _, right in map(heading, table.columns)]
    names = [heading(column)[0] for column in table.columns]
    title = f"<h2>{escape(table.title)}</h2>\n" if table.title else ""
    head = _row("th", names, sides, "") if any(names) else ""
    rows = "\n".join(_row("td", row, sides, table.tone(index)) for index, row in enumerate(table.rows))
    return f'{title}<div class="wide"><table>\n{head}{rows}\n</table></div>'


def _row(tag: str, cells: Iterable[str], sides: list[str], tone: str) -> str:
    marked = f' class="{escape(tone)}"' if tone else ""
    drawn = "".join(f"<{tag}{side}>{escape(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True))
    return f"<tr{marked}>{drawn}</tr>\n"
