"""Memory over time as a picture: its bands are the memory, and it is a PNG."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from memplan.report.model import Report
from memplan.report.timeline import Timeline
from memplan.report.views import picture
from tests.report.timelines import TIMELINES


@given(timeline=TIMELINES)
@settings(deadline=None)
def test_bands_add_up_to_the_curve(timeline: Timeline) -> None:
    found = picture.bands(timeline)
    total = [sum(counts) for counts in zip(*(counts for _, _, counts in found), strict=True)]
    assert (total or [0] * len(timeline.instants)) == [instant.device_bytes for instant in timeline.instants]
    assert len({name for name, _, _ in found}) == len(found) <= 10


def test_a_picture_is_drawn(drawn_report: Report, tmp_path: Path) -> None:
    drawn_report.save_png(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_memory_over_time_there_is_no_picture(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no memory over time"):
        report.save_png(tmp_path / "report.png")
