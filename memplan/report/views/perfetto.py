"""A timeline as a trace for Perfetto (ui.perfetto.dev): byte counters, kernels, copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.report.timeline import Line, Timeline

_SEQUENCE = 1  # one writer for all packets
_STREAMS = ("to host", "to device", "to devices")


def trace(title: str, timeline: Timeline, lines: Sequence[Line], budget_bytes: int) -> bytes:
    """The trace, as protobuf. Counters are exact bytes; times are whole nanoseconds.

    Raises:
      ImportError: perfetto is not installed.
    """
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor, TrackEvent
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError as error:
        raise ImportError("writing traces needs perfetto: pip install 'memplan[trace]'.") from error
    writer = _Writer(TraceProtoBuilder(), TrackEvent, CounterDescriptor.Unit.UNIT_SIZE_BYTES)
    writer.track(title)
    _add_memory(writer, timeline, lines, budget_bytes)
    _add_kernels(writer, timeline)
    _add_copies(writer, timeline)
    return writer.builder.serialize()


def _add_memory(
    writer: _Writer, timeline: Timeline, lines: Sequence[Line], budget_bytes: int
) -> None:
    """Counters of bytes."""
    device = writer.counter("device bytes")
    host = writer.counter("host bytes")
    budget = writer.counter("budget")
    writer.count(budget, 0.0, budget_bytes)
    writer.count(budget, timeline.end_s, budget_bytes)
    for instant in timeline.instants:
        writer.count(device, instant.start_s, instant.device_bytes)
        writer.count(host, instant.start_s, instant.host_bytes)
    for line in lines:
        track = writer.counter(f"device bytes, {line.name}")
        for start_s, nbytes in zip(line.starts_s, line.device_bytes, strict=True):
            writer.count(track, start_s, nbytes)


def _add_kernels(writer: _Writer, timeline: Timeline) -> None:
    """A slice for every instant, on one track."""
    compute = writer.track("compute", writer.top)
    for instant in timeline.instants:
        name = f"{instant.layer}/{instant.name}".lstrip("/") or "wait"
        notes = {
            "source": instant.source,
            "layer": instant.layer,
            "device bytes": instant.device_bytes,
        }
        writer.slice(compute, name, instant.doing, instant.start_s, instant.end_s, notes)


def _add_copies(writer: _Writer, timeline: Timeline) -> None:
    """A slice for every copy, on a track for each direction that has copies."""
    for direction in _STREAMS:
        copies = [copy for copy in timeline.copies if copy.direction == direction]
        stream = writer.track(f"copies {direction}", writer.top) if copies else 0
        for copy in copies:
            notes = {"bytes": copy.nbytes}
            writer.slice(stream, copy.name, "copy", copy.start_s, copy.end_s, notes)


class _Writer:
    """Packets of one sequence; the first track contains the others."""

    def __init__(self, builder: Any, event: Any, unit: int):
        self.builder = builder
        self.event = event
        self.unit = unit
        self.top = 1
        self._tracks = 0

    def track(self, name: str, parent: int = 0) -> int:
        return self._track(name, parent).uuid

    def counter(self, name: str) -> int:
        descriptor = self._track(name, self.top)
        descriptor.counter.unit = self.unit
        return descriptor.uuid

    def count(self, track: int, at_s: float, nbytes: int) -> None:
        self._event(track, at_s, self.event.TYPE_COUNTER).counter_value = nbytes

    def slice(
        self,
        track: int,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        notes: dict[str, Any],
    ) -> None:
        """Add an event, unless it has no duration."""
        if end_s <= start_s:
            return
        event = self._event(track, start_s, self.event.TYPE_SLICE_BEGIN)
        event.name = name
        event.categories.append(category)
        for key, value in notes.items():
            note = event.debug_annotations.add()
            note.name = key
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = value
        self._event(track, end_s, self.event.TYPE_SLICE_END)

    def _track(self, name: str, parent: int) -> Any:
        self._tracks += 1
        descriptor = self.builder.add_packet().track_descriptor
        descriptor.uuid = self._tracks
        descriptor.name = name
        if parent:
            descriptor.parent_uuid = parent
        descriptor.child_ordering = descriptor.EXPLICIT
        descriptor.sibling_order_rank = self._tracks
        return descriptor

    def _event(self, track: int, at_s: float, kind: int) -> Any:
        packet = self.builder.add_packet()
        packet.timestamp = round(1e9 * at_s)
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event
