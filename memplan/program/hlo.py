"""Reads what XLA writes about an executable: scheduled HLO, buffers, live ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from memplan.xla.frames import sources
from memplan.xla.module import read_module

HOST_SPACE = 5  # XLA's number for pinned host memory

_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[^ {]+)(?P<index>\{[\d,]*\})?(?: \(phi\))? @(?P<space>\d+)> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$"
)
_RANGE = re.compile(r"^    (?P<name>[^ {]+)(?P<index>\{[\d,]*\}):(?P<start>\d+)-(?P<end>\d+)$")
_STEP = re.compile(r"^    (?P<position>\d+):(?P<name>\S+)$")
_NAMED = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = .*op_name=\"(?P<path>[^\"]*)\"", re.MULTILINE)
_MARK = re.compile(r"memplan\.(?P<segment>\d+)\.(?P<op>\d+)(?:/|$)")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value of the executable that has memory of its own.

    Attributes:
      name: HLO instruction, with the tuple index where it has one.
      nbytes: bytes.
      start, end: first and last position in the schedule at which it is needed. It is not where another one, written
        over it, starts.
      temporary: False for arguments and outputs.
      offset: bytes from the beginning of its allocation.
      shape: as XLA prints it, without its layout.
    """

    name: str
    nbytes: int
    start: int
    end: int
    temporary: bool
    on_host: bool
    offset: int = 0
    shape: str = ""


@dataclass(frozen=True)
class Schedule:
    """An executable's instructions in the order they run, with the buffers they need.

    Attributes:
      steps: HLO instruction names in order.
      buffers: all buffers.
      marks: instruction name -> (segment of the plan, op id), where the rewriter left its mark.
      paths: instruction name -> jax's name stack.
      sources: instruction name -> `file:line`.
    """

    steps: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    marks: dict[str, tuple[int, int]]
    paths: dict[str, str]
    sources: dict[str, str] = field(default_factory=dict)

    @cached_property
    def live_nbytes(self) -> tuple[int, ...]:
        """Device bytes of temporaries alive at each step."""
        return self._live(on_host=False)

    @cached_property
    def host_live_nbytes(self) -> tuple[int, ...]:
        """Host bytes of temporaries alive at each step."""
        return self._live(on_host=True)

    def _live(self, on_host: bool) -> tuple[int, ...]:
        change = [0] * (len(self.steps) + 2)
        for buffer in self.buffers:
            if buffer.temporary and buffer.on_host == on_host:
                change[buffer.start] += buffer.nbytes
                change[min(buffer.end, len(self.steps)) + 1] -= buffer.nbytes
        live, total = [], 0
        for position in range(len(self.steps)):
            total += change[position]
            live.append(total)
        return tuple(live)

    @cached_property
    def peak_step(self) -> int:
        live = self.live_nbytes
        return max(range(len(live)), key=live.__getitem__) if live else 0

    def alive(self, step: int) -> list[Buffer]:
        """Temporaries on the device at a step, largest first."""
        found = [b for b in self.buffers if b.start <= step <= b.end and b.temporary and not b.on_host]
        return sorted(found, key=lambda buffer: -buffer.nbytes)

    def mark(self, name: str) -> tuple[int, int] | None:
        """(segment, op) that a buffer or instruction belongs to."""
        return self.marks.get(name.partition("{")[0])

    @cached_property
    def segment_of_step(self) -> tuple[int, ...]:
        """Segment of the plan that each step belongs to; fences keep them in order: unmarked steps follow the last."""
        found, current = [], 0
        for name in self.steps:
            mark = self.marks.get(name)
            current = max(current, mark[0]) if mark else current
            found.append(current)
        return tuple(found)

    def segment_peaks(self) -> dict[int, int]:
        """Largest bytes of temporaries in each segment of the plan."""
        peaks: dict[int, int] = {}
        for segment, live in zip(self.segment_of_step, self.live_nbytes, strict=True):
            peaks[segment] = max(peaks.get(segment, 0), live)
        return peaks


def read_schedule(hlo: str, live_ranges: str, assignment: str) -> Schedule:
    """From the scheduled HLO text and XLA's dumped `live-range.txt` and `buffer-assignment.txt`."""
    paths = {match["name"]: match["path"] for match in _NAMED.finditer(hlo)}
    marks = {name: (int(m["segment"]), int(m["op"])) for name, path in paths.items() if (m := _MARK.search(path))}
    steps = tuple(match["name"] for line in live_ranges.splitlines() if (match := _STEP.match(line)))
    ranges = {
        match["name"] + match["index"]: (int(match["start"]), int(match["end"]))
        for line in live_ranges.splitlines()
        if (match := _RANGE.match(line))
    }
    lines = sources(read_module(hlo)) if "is_scheduled=true" in hlo else {}
    return Schedule(steps, tuple(_written_over(list(_buffers(assignment, ranges)))), marks, paths, lines)


def _buffers(assignment: str, ranges: dict[str, tuple[int, int]]) -> Iterator[Buffer]:
    temporary = False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            temporary = "preallocated-temp" in line
            continue
        match = _VALUE.match(line)
        if match is None:
            if line.startswith(("Used values", "HloLiveRange")):
                return
            continue
        name = match["name"] + (match["index"] or "{}")
        if name in ranges:
            start, end = ranges[name]
            on_host = int(match["space"]) == HOST_SPACE
            shape = match["shape"].partition("{")[0]
            yield Buffer(name, int(match["size"]), start, end, temporary, on_host, int(match["offset"]), shape)


def _written_over(buffers: list[Buffer]) -> Iterator[Buffer]:
    """A kernel may write over what it reads: XLA then gives both one place, and both ranges hold the same step."""
    starts = {(b.offset, b.start) for b in buffers if b.temporary and not b.on_host}
    for buffer in buffers:
        shared = buffer.temporary and buffer.start < buffer.end and (buffer.offset, buffer.end) in starts
        yield replace(buffer, end=buffer.end - 1) if shared else buffer
