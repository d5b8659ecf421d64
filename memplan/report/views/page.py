"""Self-contained pages of results: JSON, a style and a script, which their hashes allow."""

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from memplan.report.views import packed
from memplan.report.views.table import Table, html

_SHARED_SCRIPTS = (
    *("format", "packed", "scale", "levels", "memory", "streams"),
    *("table", "parts", "chart", "pointer", "explore"),
)
_ESCAPES = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


FALLBACK_ROWS = 200
"""Rows of long tables if no script runs."""


@dataclass(frozen=True, slots=True)
class Header:
    """The head of a page."""

    title: str
    subtitle: str
    status: str
    is_good: bool  # selects the style of the status


def of_report(
    header: Header, entries: Mapping[str, Any], tables: Sequence[Table], fallbacks: Sequence[Table]
) -> str:
    """The page of a report.

    Args:
      entries: data for the page's script.
      tables: always shown.
      fallbacks: shown only without scripts.
    """
    sections = f"""<section id="memory"><h2>Memory over the step</h2></section>
<section id="live"><h2 id="live-title">In memory</h2><p class="note" id="live-told"></p>
<div id="live-table"></div></section>
<section id="decisions"><h2>Decisions</h2></section>
<section id="collectives"><h2>Collectives</h2></section>
<section>{html(table for table in tables if table.rows)}</section>"""
    return _page("page", header, entries, sections, fallbacks)


def of_difference(
    header: Header, entries: Mapping[str, Any], tables: Sequence[Table], fallbacks: Sequence[Table]
) -> str:
    """The page of a difference, with the same arguments."""
    sections = f"""<section id="memory"><h2>Memory over both steps</h2></section>
<section id="buffers"><h2>Buffers at the peak that differ</h2></section>
<section>{html(table for table in tables if table.rows)}</section>"""
    return _page("difference", header, entries, sections, fallbacks)


def _page(
    script: str,
    header: Header,
    entries: Mapping[str, Any],
    sections: str,
    fallbacks: Sequence[Table],
) -> str:
    style = _asset("page.css")
    scripts = "".join(_asset(f"{name}.js") for name in (*_SHARED_SCRIPTS, script))
    program = f"(() => {{\n'use strict';\n{scripts}}})();"
    policy = (
        f"default-src 'none'; script-src '{_digest(program)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(header.title)}, {escape(header.subtitle)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(header.title)}</h1>
<span class="status {"good" if header.is_good else ""}">{escape(header.status)}</span>
<span class="subtitle">{escape(header.subtitle)}</span>
<span class="spring"></span>
<button id="theme" type="button" hidden>theme: auto</button></header>
<main>
<div class="tiles" id="tiles"></div>
{sections}
<section class="undrawn">{html(table for table in fallbacks if table.rows)}</section>
</main>
<script type="application/json" id="report">{packed.dumps(entries).translate(_ESCAPES)}</script>
<script>{program}</script>
</body>
</html>
"""


def frame(page: str, title: str) -> str:
    """A page inside another page, isolated from it in both directions."""
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" srcdoc="{escape(page)}" '
        'loading="lazy" '
        'style="width: 100%; height: 760px; border: 0; border-radius: 8px"></iframe>'
    )


@functools.cache
def _asset(name: str) -> str:
    return (resources.files("memplan.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The hash by which a content security policy allows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
