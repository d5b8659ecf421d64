"""Tables: literal text in a terminal; an escaped, self-contained page."""

import io
import re

import pytest
from rich.console import Console

from memplan.report.model import Report
from memplan.report.views import table as views
from memplan.report.views.table import Table

HOSTILE = "<script>alert(1)</script>\"'&"


def test_long_sources_keep_their_end() -> None:
    for source in ("", "net.py:3", "c/d/net.py:3"):
        assert views.short_source(source) == source
    assert views.short_source("/a/b/c/net.py:3") == "../c/net.py:3"


def test_a_title_counts_the_omitted_rows() -> None:
    assert views.largest("Decisions", 3, 3) == "Decisions (3)"
    assert views.largest("Decisions", 3, 9) == "Decisions (the largest 3 of 9)"


def test_text_is_plain_and_takes_names_literally(report: Report) -> None:
    text = str(report)
    assert "\x1b" not in text
    assert "state.params['w']" in text
    assert max(map(len, text.splitlines())) <= 120


def test_in_a_notebook_text_is_text(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    """In a notebook, rich displays its output."""
    text = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == text != ""


def test_rich_draws_the_report(report: Report) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report)
    assert "recomputed in a step" in console.export_text()


def test_numbers_are_flush_right_and_headings_lose_their_mark() -> None:
    drawn = views.plain(
        [Table("title", (">bytes", "name"), (("1", "a"), ("1,000", "b")))]
    ).splitlines()
    assert drawn[0] == "title" and ">" not in "".join(drawn)
    assert [line.split() for line in drawn[-2:]] == [["1", "a"], ["1,000", "b"]]
    assert len({line.index(name) for line, name in zip(drawn[-2:], "ab", strict=True)}) == 1
    assert drawn[-2].index("1") == drawn[-1].index("1,000") + 4


def test_a_column_without_anything_is_not_shown() -> None:
    columns = (">bytes", "shape", "name", "halo")
    table = Table("", columns, (("1", "", "a", "-"), ("2", "-", "", "-")))
    assert views.plain([table]).split()[:2] == ["bytes", "name"]
    assert "<th>name</th>" in views.html([table]) and "shape" not in views.html([table])
    assert views.html([table]).count("<td") == 4
    assert table.filled.filled == table.filled
    assert Table("", columns, ()).filled.columns == columns


def test_a_table_without_headings_has_none() -> None:
    assert views.plain([Table("", ("", ""), (("a", "b"),))]).split() == ["a", "b"]


@pytest.mark.parametrize("cell", ["[bold]x[/bold]", ":smile:", "[/]", "\\["])
def test_markup_and_emoji_are_taken_literally(cell: str) -> None:
    assert cell in views.plain([Table("", ("a",), ((cell,),))])


def test_long_cells_are_folded() -> None:
    name = "x" * 300
    drawn = views.plain([Table("", ("name", ">n"), ((name, "123456"),))])
    assert max(map(len, drawn.splitlines())) <= views.WIDTH
    assert drawn.count("x") == 300 and "123456" in drawn


def test_rows_have_the_colour_of_their_emphasis() -> None:
    out = io.StringIO()
    table = Table("", ("a",), (("well",), ("ill",), ("plain",)), ("good", "bad", ""))
    Console(file=out, force_terminal=True, color_system="standard", width=80).print(
        views.rich(table)
    )
    lines = {
        word: line
        for line in out.getvalue().splitlines()
        for word in ("well", "ill", "plain")
        if word in line
    }
    assert (
        "\x1b[32m" in lines["well"]
        and "\x1b[31m" in lines["ill"]
        and "\x1b[3" not in lines["plain"]
    )


def test_everything_is_escaped() -> None:
    table = Table(HOSTILE, (HOSTILE, ">" + HOSTILE), ((HOSTILE, HOSTILE),), ("good",))
    page = views.page(HOSTILE, [table])
    assert (
        "<script" not in page
        and page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2 + 1 + 2 + 2
    )
    assert not re.search(r"https?://|@import|url\(|src=|href=", page)


def test_sides_and_tones() -> None:
    body = views.html(
        [Table("t", (">n", "name"), (("1", "a"), ("2", "b"), ("3", "c")), ("good", "bad", ""))]
    )
    assert '<tr><th class="right">n</th><th>name</th></tr>' in body
    rows = [
        '<tr class="good"><td class="right">1</td><td>a</td></tr>',
        '<tr class="bad"><td class="right">2</td><td>b</td></tr>',
        '<tr><td class="right">3</td><td>c</td></tr>',
    ]
    assert [body.count(row) for row in rows] == [1, 1, 1]


def test_without_titles_and_headings_there_are_no_empty_ones() -> None:
    body = views.html([Table("", ("", ""), (("a", "b"),))])
    assert "<h2>" not in body and "<th>" not in body and "<td>a</td><td>b</td>" in body
