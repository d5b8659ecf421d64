"""Traces: Perfetto reads the figures of the report."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from memplan.report.model import Report
from memplan.report.timeline import Timeline
from memplan.report.views import perfetto
from tests.report.timelines import HOSTILE, TIMELINES, lines_of
from tests.report.views.trace_processor import TraceProcessor

MAXIMUM = (
    "select max(value) from counter join counter_track t on track_id = t.id where t.name = '{}'"
)


@pytest.fixture
def load(browser: Any) -> Iterator[Any]:
    opened: list[TraceProcessor] = []

    def read(trace: bytes) -> TraceProcessor:
        opened.append(TraceProcessor(browser, trace))
        return opened[-1]

    yield read
    for event in opened:
        event.close()


def _packets(trace: bytes) -> Any:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    return Trace.FromString(trace).packet


def _counted(trace: bytes, name: str) -> list[int]:
    packets = _packets(trace)
    tracks = [p.track_descriptor.uuid for p in packets if p.track_descriptor.name == name]
    events = (p.track_event for p in packets if p.HasField("track_event"))
    return [
        event.counter_value
        for event in events
        if event.track_uuid in tracks and event.HasField("counter_value")
    ]


@given(timeline=TIMELINES)
@settings(deadline=None)
def test_counters_are_the_curves(timeline: Timeline) -> None:
    trace = perfetto.trace("title", timeline, lines_of(timeline), 2**30)
    assert _counted(trace, "device bytes") == [
        instant.device_bytes for instant in timeline.instants
    ]
    assert _counted(trace, "host bytes") == [instant.host_bytes for instant in timeline.instants]
    assert _counted(trace, "budget") == [2**30] * 2
    assert _counted(trace, "device bytes, unmodified step") == [2**28, 2**29]


@given(timeline=TIMELINES)
@settings(deadline=None)
def test_slices_are_paired_and_in_order(timeline: Timeline) -> None:
    events = [
        p for p in _packets(perfetto.trace("title", timeline, (), 1)) if p.HasField("track_event")
    ]
    kinds = [p.track_event.type for p in events]
    lasting = [event for event in timeline.instants if event.end_s > event.start_s]
    lasting += [event for event in timeline.copies if event.end_s > event.start_s]
    assert kinds.count(1) == kinds.count(2) == len(lasting)
    names = [p.track_event.name for p in events if p.track_event.type == 1]
    assert all(names)


def test_perfetto_reads_the_figures_of_the_report(
    load: Any, drawn_report: Report, tmp_path: Path
) -> None:
    drawn_report.save_trace(tmp_path / "report.pftrace")
    processor = load((tmp_path / "report.pftrace").read_bytes())
    timeline = drawn_report.timeline
    peak = max(instant.device_bytes for instant in timeline.instants)
    assert processor.query(MAXIMUM.format("device bytes")) == [(float(peak),)]
    assert processor.query(MAXIMUM.format("host bytes")) == [
        (float(max(i.host_bytes for i in timeline.instants)),)
    ]
    assert processor.query(MAXIMUM.format("budget")) == [(float(drawn_report.budget_bytes),)]
    lasting = [event for event in timeline.instants if event.end_s > event.start_s]
    slices = "select s.name, s.dur from slice s join track t on s.track_id = t.id where t.name = '{}' order by s.ts"
    rows = processor.query(slices.format("compute"))
    assert len(rows) == len(lasting)
    assert any(HOSTILE in name for name, _ in rows)
    starts = [(round(1e9 * event.start_s), round(1e9 * event.end_s)) for event in lasting]
    assert [length for _, length in rows] == [end - start for start, end in starts]
    copies = [event for event in timeline.copies if event.direction == "to host"]
    assert len(processor.query(slices.format("copies to host"))) == len(copies)
    errors = "select name, value from stats where severity = 'error' and value > 0"
    assert processor.query(errors) == []


def test_without_memory_over_time_it_says_why(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no timeline"):
        report.save_trace(tmp_path / "report.pftrace")
    assert not list(tmp_path.iterdir())


def test_a_trace_replaces_an_older_file_whole(drawn_report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.pftrace"
    path.write_text("older")
    drawn_report.save_trace(path)
    once = path.read_bytes()
    replace(drawn_report, attempts=9).save_trace(path)
    assert path.read_bytes() == once
    assert [file.name for file in tmp_path.iterdir()] == ["report.pftrace"]
