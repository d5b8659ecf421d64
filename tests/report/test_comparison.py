"""Comparisons list the figures of each method, and those that are unknown."""

from dataclasses import replace
from pathlib import Path

import pytest

from memplan.report.comparison import Comparison, Row

GIB = 2**30


@pytest.fixture
def comparison() -> Comparison:
    rows = (
        Row("plain jax", 10 * GIB, 0, 0.1, False),
        Row("jax.checkpoint", None, None, None, None, "no blocks were named"),
        Row("memplan", 2 * GIB, 3 * GIB, 0.12, True, "<b>3 plans</b>"),
    )
    return Comparison(rows, "v100", 3 * GIB, versions=(("jax", "0.11.2"),))


def test_text_has_a_line_for_each_method(comparison: Comparison) -> None:
    text = str(comparison)
    assert "One step on v100 in 3.00 GiB" in text
    by_way = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "no" in by_way["plain jax"]
    assert "not known" in by_way["jax.checkpoint"]
    assert "2.00 GiB" in by_way["memplan"]


def test_page_marks_methods_that_fit_and_escapes_notes(
    comparison: Comparison, tmp_path: Path
) -> None:
    comparison.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;3 plans&lt;/b&gt;" in page
    assert page.count('<tr class="good">') == 1
    assert page.count('<tr class="bad">') == 1


def test_any_fits_counts_only_what_is_known_to_fit(comparison: Comparison) -> None:
    assert comparison.any_fits
    assert not Comparison(comparison.rows[:2]).any_fits


def test_a_tie_is_told_where_seconds_do_not_tell_steps_apart(comparison: Comparison) -> None:
    slower = Row("jax.checkpoint, nothing saved", 2 * GIB, 0, 0.13, True)
    slowest = Row("jax.checkpoint, dots saved", 2 * GIB, 0, 0.2, True, "slow")
    several = replace(comparison, rows=(*comparison.rows, slower, slowest), seconds_error=0.15)
    assert [several.ties(row) for row in several.rows] == [False, False, True, True, False]
    (table,) = several.tables(0)
    tie = "a tie for the fastest: seconds may be off by 15%"
    assert [row[-1] for row in table.rows[2:]] == [f"<b>3 plans</b>; {tie}", tie, "slow"]
    assert not any(map(replace(several, seconds_error=None).ties, several.rows))
    alone = replace(comparison, seconds_error=0.15)
    assert not any(map(alone.ties, alone.rows))
