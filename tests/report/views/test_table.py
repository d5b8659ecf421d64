"""What stands in tables."""

from __future__ import annotations

import pytest

from memplan.report.views import table


@pytest.mark.parametrize(
    ("source", "written"),
    [("", ""), ("net.py:3", "net.py:3"), ("/a/b/c/net.py:3", "../c/net.py:3"), ("c/d/net.py:3", "c/d/net.py:3")],
)
def test_long_sources_keep_their_end(source: str, written: str) -> None:
    assert table.short_source(source) == written


def test_a_title_owns_up_to_what_it_leaves_out() -> None:
    assert table.largest("Decisions", 3, 3) == "Decisions (3)"
    assert table.largest("Decisions", 3, 9) == "Decisions (the largest 3 of 9)"
