"""Tables as a page: whole, escaped, nothing loaded."""

from __future__ import annotations

import re

from memplan.report.views import html
from memplan.report.views.table import Table

HOSTILE = "<script>alert(1)</script>\"'&"


def test_everything_is_escaped() -> None:
    table = Table(HOSTILE, (HOSTILE, ">" + HOSTILE), ((HOSTILE, HOSTILE),), ("good",))
    page = html.page(HOSTILE, [table])
    assert "<script" not in page and page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2 + 1 + 2 + 2
    assert not re.search(r"https?://|@import|url\(|src=|href=", page)


def test_sides_and_tones() -> None:
    body = html.body([Table("t", (">n", "name"), (("1", "a"), ("2", "b"), ("3", "c")), ("good", "bad", ""))])
    assert '<tr><th class="right">n</th><th>name</th></tr>' in body
    rows = [
        '<tr class="good"><td class="right">1</td><td>a</td></tr>',
        '<tr class="bad"><td class="right">2</td><td>b</td></tr>',
        '<tr><td class="right">3</td><td>c</td></tr>',
    ]
    assert [body.count(row) for row in rows] == [1, 1, 1]


def test_without_titles_and_headings_there_are_no_empty_ones() -> None:
    body = html.body([Table("", ("", ""), (("a", "b"),))])
    assert "<h2>" not in body and "<th>" not in body and "<td>a</td><td>b</td>" in body
