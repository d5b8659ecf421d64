"""Pictures by matplotlib: what stands in them, and what to install without it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from memplan.report.views import plot


def test_a_series_is_joined_or_not_and_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "encode", lambda figure: drawn.append(figure) or b"")
    series = [plot.Series("one", [(1, 2), (3, 4)], True), plot.Series("two", [(5, 6)], False)]
    plot.png("title", ("x", "y"), series, ("limit", 2.5))
    (axes,) = drawn[0].axes
    limit, one, two = axes.get_lines()
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("title", "x", "y")
    assert [line.get_label() for line in (limit, one, two)] == ["limit", "one", "two"]
    assert list(limit.get_xdata()) == [2.5, 2.5] and one.get_xydata().tolist() == [[1, 2], [3, 4]]
    assert one.get_linestyle() == "-" and two.get_linestyle() == "None"


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'memplan\[plots\]'"):
        plot.figure(1, 1)
