"""Memory over time as data: through JSON and back, and summed for pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from memplan.report.model import Report
from memplan.report.timeline import Timeline
from memplan.report.views import picture
from tests.report.timelines import TIMELINES, lines_of


@given(timeline=TIMELINES)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_brings_it_back(report: Report, timeline: Timeline) -> None:
    whole = replace(report, timeline=timeline, lines=lines_of(timeline))
    assert Report.from_json(whole.to_json()) == whole


def test_json_has_a_row_to_a_line(drawn_report: Report) -> None:
    lines = drawn_report.to_json().splitlines()
    assert drawn_report.timeline is not None
    for row in ("start_s", "place", "direction"):
        rows = [line for line in lines if f'"{row}":' in line and line.lstrip().startswith("{")]
        assert rows and all(json.loads(line.strip().removesuffix(",")) for line in rows)
    assert len([line for line in lines if '"place":' in line]) == len(drawn_report.timeline.stays)


def test_json_that_is_no_timeline_is_refused(drawn_report: Report) -> None:
    broken = json.loads(drawn_report.to_json())
    broken["timeline"]["instants"][3]["doing"] = "sleep"
    with pytest.raises(ValueError, match=r"timeline\.instants\[3\]\.doing"):
        Report.from_json(json.dumps(broken))
    with pytest.raises(ValueError, match="timeline"):
        Report.from_json(json.dumps({**broken, "timeline": 3}))


@given(timeline=TIMELINES)
@settings(deadline=None)
def test_bands_add_up_to_the_curve(timeline: Timeline) -> None:
    found = picture.bands(timeline)
    total = [sum(counts) for counts in zip(*(counts for _, _, counts in found), strict=True)]
    assert (total or [0] * len(timeline.instants)) == [instant.device_bytes for instant in timeline.instants]
    assert len({name for name, _, _ in found}) == len(found) <= 10


def test_the_peak_is_the_highest_instant(drawn_report: Report) -> None:
    timeline = drawn_report.timeline
    assert timeline is not None
    assert timeline.instants[timeline.peak].device_bytes == max(one.device_bytes for one in timeline.instants)


def test_a_picture_is_drawn(drawn_report: Report, tmp_path: Path) -> None:
    drawn_report.save_png(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_memory_over_time_there_is_no_picture(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no memory over time"):
        report.save_png(tmp_path / "report.png")
