"""Tables in a terminal: plain, taken literally, no wider than they may be."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from memplan.report.model import Report
from memplan.report.views import text
from memplan.report.views.table import Table


def test_text_is_plain_and_takes_names_literally(report: Report) -> None:
    text = str(report)
    assert "\x1b" not in text
    assert "state.params['w']" in text
    assert max(map(len, text.splitlines())) <= 120


def test_rich_draws_the_report(report: Report) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report)
    assert "recomputed in a step" in console.export_text()


def test_numbers_are_flush_right_and_headings_lose_their_mark() -> None:
    drawn = text.plain([Table("title", (">bytes", "name"), (("1", "a"), ("1,000", "b")))]).splitlines()
    assert drawn[0] == "title" and ">" not in "".join(drawn)
    assert [line.split() for line in drawn[-2:]] == [["1", "a"], ["1,000", "b"]]
    assert len({line.index(name) for line, name in zip(drawn[-2:], "ab", strict=True)}) == 1
    assert drawn[-2].index("1") == drawn[-1].index("1,000") + 4


def test_a_table_without_headings_has_none() -> None:
    assert text.plain([Table("", ("", ""), (("a", "b"),))]).split() == ["a", "b"]


@pytest.mark.parametrize("cell", ["[bold]x[/bold]", ":smile:", "[/]", "\\["])
def test_markup_and_emoji_are_taken_literally(cell: str) -> None:
    assert cell in text.plain([Table("", ("a",), ((cell,),))])


def test_what_is_too_long_is_folded_and_not_cut() -> None:
    name = "x" * 300
    drawn = text.plain([Table("", ("name", ">n"), ((name, "123456"),))])
    assert max(map(len, drawn.splitlines())) <= text.WIDTH
    assert drawn.count("x") == 300 and "123456" in drawn


def test_rows_have_the_colour_of_their_emphasis() -> None:
    out = io.StringIO()
    table = Table("", ("a",), (("well",), ("ill",), ("plain",)), ("good", "bad", ""))
    Console(file=out, force_terminal=True, color_system="standard", width=80).print(text.render(table))
    lines = {word: line for line in out.getvalue().splitlines() for word in ("well", "ill", "plain") if word in line}
    assert "\x1b[32m" in lines["well"] and "\x1b[31m" in lines["ill"] and "\x1b[3" not in lines["plain"]
