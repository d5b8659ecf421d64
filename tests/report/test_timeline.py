"""Memory over time as data: through JSON and back."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from memplan.report.model import Report
from memplan.report.timeline import Timeline
from tests.report.timelines import TIMELINES, lines_of


@given(timeline=TIMELINES)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_brings_it_back(report: Report, timeline: Timeline) -> None:
    whole = replace(report, timeline=timeline, lines=lines_of(timeline))
    assert Report.from_json(whole.to_json()) == whole


def test_json_that_is_no_timeline_is_refused(drawn_report: Report) -> None:
    broken = json.loads(drawn_report.to_json())
    broken["timeline"]["instants"][3]["doing"] = "sleep"
    with pytest.raises(ValueError, match=r"timeline\.instants\[3\]\.doing"):
        Report.from_json(json.dumps(broken))
    with pytest.raises(ValueError, match="timeline"):
        Report.from_json(json.dumps({**broken, "timeline": 3}))


def test_the_peak_is_the_highest_instant(drawn_report: Report) -> None:
    timeline = drawn_report.timeline
    assert timeline.instants[timeline.peak].device_bytes == max(
        instant.device_bytes for instant in timeline.instants
    )
