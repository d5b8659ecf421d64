"""Memory over time of a scheduled module adds up, and its peak is the compiler's."""

from collections.abc import Callable
from typing import Any

import pytest

import memplan
from memplan.report.model import Report
from memplan.report.timeline import Timeline
from tests.results.copied import report_with_copies
from tests.xla.steps import branching, dense, scanned
from tests.xla.test_target import needs_compiler


def check(report: Report) -> None:
    """Values and other bytes add up to the curves, without gaps until the end of the step."""
    timeline = report.timeline
    for index, instant in enumerate(timeline.instants):
        alive = [stay for stay in timeline.stays if stay.first <= index < stay.last]
        places = {"device": instant.device_bytes - instant.other_bytes, "host": instant.host_bytes}
        for place, nbytes in places.items():
            assert (
                sum(timeline.values[stay.value].nbytes for stay in alive if stay.place == place)
                == nbytes
            )
    starts = [instant.start_s for instant in timeline.instants[1:]]
    assert starts == pytest.approx([instant.end_s for instant in timeline.instants[:-1]])
    assert timeline.instants[timeline.peak].device_bytes == pytest.approx(
        report.predicted_peak_bytes, abs=1024
    )
    assert timeline.end_s == pytest.approx(report.predicted_step_s)


@pytest.mark.parametrize("make", [dense, scanned, branching])
def test_a_step_over_time(make: Callable[..., Any]) -> None:
    step, args = make(64, 4)
    report = memplan.jit(step, donate_argnums=0).plan(*args).report
    check(report)
    assert [line.name for line in report.lines] == ["unmodified step"]


def test_loops_and_branches_are_spans_of_the_step() -> None:
    step, args = scanned(64, 4)
    looped = memplan.jit(step, donate_argnums=0).plan(*args).report.timeline
    assert [(block.kind, block.count) for block in looped.blocks] == [("loop", 4)] * 2
    ends = [end for block in looped.blocks for end in (block.start_s, block.end_s)]
    assert ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= looped.end_s
    assert all("steps.py:" in block.source for block in looped.blocks)
    step, args = branching(64, 4)
    branched = memplan.jit(step, donate_argnums=0).plan(*args).report.timeline
    assert ("branches", 2) in [(block.kind, block.count) for block in branched.blocks]


def of(timeline: Timeline | None, doing: str) -> int:
    return sum(instant.doing == doing for instant in timeline.instants)


def test_a_plan_over_time() -> None:
    step, args = dense(64, 6)
    whole = memplan.jit(step, donate_argnums=0).plan(*args).report
    report = (
        memplan.jit(step, budget=int(0.75 * whole.baseline_peak_bytes), donate_argnums=0)
        .plan(*args)
        .report
    )
    check(report)
    assert of(whole.timeline, "recompute") == 0 < of(report.timeline, "recompute")
    (line,) = report.lines
    assert max(line.device_bytes) == pytest.approx(whole.predicted_peak_bytes, abs=1024)


@needs_compiler
@pytest.mark.gpu_aot
def test_copies_over_time() -> None:
    report = report_with_copies()
    check(report)
    directions = [copy.direction for copy in report.timeline.copies]
    assert directions.count("to host") <= directions.count("to device")
    assert report.copies_found == len(directions)
    assert max(instant.host_bytes for instant in report.timeline.instants) <= report.host_peak_bytes
    assert sum(row.decision == "offload" for row in report.decisions) == len(
        {c.name for c in report.timeline.copies}
    )
