"""Pictures by matplotlib: bands add up to the memory, curves are joined or not."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from memplan.report.model import Report
from memplan.report.timeline import Timeline
from memplan.report.views import pictures
from tests.report.timelines import TIMELINES


@given(timeline=TIMELINES)
@settings(deadline=None)
def test_bands_add_up_to_the_curve(timeline: Timeline) -> None:
    bands = pictures.bands(timeline)
    total = [sum(counts) for counts in zip(*(counts for _, _, counts in bands), strict=True)]
    assert (total or [0] * len(timeline.instants)) == [
        instant.device_bytes for instant in timeline.instants
    ]
    assert len({name for name, _, _ in bands}) == len(bands) <= 10


def test_a_picture_is_drawn(drawn_report: Report, tmp_path: Path) -> None:
    drawn_report.save_png(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_memory_over_time_there_is_no_picture(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no timeline"):
        report.save_png(tmp_path / "report.png")


def test_a_series_is_joined_or_not_and_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "encode", lambda figure: drawn.append(figure) or b"")
    joined, apart = (
        pictures.Series("one", [(1, 2), (3, 4)], True),
        pictures.Series("two", [(5, 6)], False),
    )
    pictures.png_of_series("title", ("x", "y"), [joined, apart], ("limit", 2.5))
    (axes,) = drawn[0].axes
    limit, first_line, two = axes.get_lines()
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("title", "x", "y")
    assert [line.get_label() for line in (limit, first_line, two)] == ["limit", "one", "two"]
    assert list(limit.get_xdata()) == [2.5, 2.5]
    assert first_line.get_xydata().tolist() == [[1, 2], [3, 4]]
    assert first_line.get_linestyle() == "-" and two.get_linestyle() == "None"


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'memplan\[plots\]'"):
        pictures.figure()
