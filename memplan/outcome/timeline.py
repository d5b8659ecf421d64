"""A scheduled module -> memory over the step as report rows, by XLA's rules for buffers, at the times of the replay."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.packing import Lifetime
from memplan.report.timeline import Copy, Direction, Doing, Instant, Line, Place, Stay, Timeline, Value
from memplan.xla.buffers import instruction_of, leaf_of
from memplan.xla.module import Module
from memplan.xla.replay import Replay
from memplan.xla.shapes import Array
from memplan.xla.sources import layer_of, scopes, sources
from memplan.xla.write import original

_DIRECTIONS: Mapping[str, Direction] = {"out": "to host", "in": "to device", "net": "to devices"}


class Origins:
    """Where the instructions of a module come from, and of those that were written into it."""

    def __init__(self, base: Module):
        """`base` is what was planned, and knows the source."""
        self._sources, self._scopes, self._instructions = sources(base), scopes(base), base.instructions

    def source(self, name: str) -> str:
        """`file:line`, or ''."""
        return self._sources.get(original(name), "")

    def scope(self, name: str) -> str:
        return self._scopes.get(original(name), "")

    def array(self, buffer: str) -> Array | None:
        """What lies in a buffer `instruction{leaf}`."""
        op, leaf = self._instructions.get(original(instruction_of(buffer))), leaf_of(buffer)
        return op.result[leaf] if op is not None and leaf < len(op.result) else None

    def shape(self, buffer: str) -> str:
        """As `float32[64,112]`, or ''."""
        array = self.array(buffer)
        return array.in_numpy if array else ""


def timeline(scheduled: ScheduledModule, origins: Origins, decisions: Mapping[str, str]) -> Timeline:
    """Memory over a step, and what it does meanwhile; its peak is what XLA allocates.

    Args:
      origins: of what it was written from.
      decisions: by the names of the buffers of what was planned.
    """
    return _Builder(scheduled, origins, decisions).timeline()


def line(name: str, memory: Timeline) -> Line:
    """The device memory alone."""
    changes = [now for before, now in pairwise(memory.instants) if now.device_bytes != before.device_bytes]
    shown = [*memory.instants[:1], *changes]
    starts, nbytes = tuple(one.start_s for one in shown), tuple(one.device_bytes for one in shown)
    return Line(name, memory.origin, starts, nbytes, memory.end_s)


def peak_lifetimes(scheduled: ScheduledModule) -> list[Lifetime]:
    """Of temporaries that are on the device where its memory is highest."""
    device, _ = _step_lifetimes(scheduled)
    live = list(accumulate(_changes(device, len(scheduled.problem.kernels))))
    peak = live.index(max(live))
    return [one for one in device if one.first <= peak < one.end]


def _kernel_times(names: Sequence[str], replay: Replay) -> list[tuple[float, float]]:
    """Start and end, in seconds on the compute stream, of every kernel of a problem.

    Those of a loop's body stand in front of the loop. They share its time in proportion to what they take, as if they
    ran once.
    """
    times: list[tuple[float, float]] = []
    body: list[float] = []
    for name in names:
        if name not in replay.clock:
            body.append(replay.seconds.get(name, 0.0))
            continue
        start, end = replay.clock[name]
        if body:
            scale = (end - start) / (sum(body) or 1.0)
            edges = [start, *(start + scale * part for part in accumulate(body))]
            times += pairwise(edges)
            start = edges[-1]
            body = []
        times.append((start, end))
    return times + [(replay.step_s, replay.step_s)] * len(body)


def _step_lifetimes(scheduled: ScheduledModule) -> tuple[list[Lifetime], list[Lifetime]]:
    """What takes memory while the step runs, on the device and on the host."""
    count = len(scheduled.problem.kernels)
    device, host = (
        [Lifetime(one.buffer, max(one.first, 0), min(one.end, count), one.nbytes) for one in where]
        for where in scheduled.lifetimes
    )
    return [one for one in device if one.nbytes and one.first < one.end], host


def _changes(where: Sequence[Lifetime], count: int) -> list[int]:
    change = [0] * (count + 1)
    for one in where:
        change[one.first] += one.nbytes
        change[one.end] -= one.nbytes
    return change


class _Builder:
    """Between two of its bounds nothing changes."""

    def __init__(self, scheduled: ScheduledModule, origins: Origins, decisions: Mapping[str, str]):
        self.replay, self.origins, self.decisions = scheduled.replay, origins, decisions
        self.names = [kernel.name for kernel in scheduled.problem.kernels]
        self.buffers = [buffer.name for buffer in scheduled.problem.buffers]
        self.times = _kernel_times(self.names, self.replay)
        self.resident, self.constant_bytes = scheduled.resident_bytes, scheduled.constant_bytes
        count = len(self.names)
        self.device, self.host = _step_lifetimes(scheduled)
        self.live, self.live_on_host = (list(accumulate(_changes(where, count))) for where in (self.device, self.host))
        self.unused = scheduled.packing.nbytes - max(self.live)
        bounds = {0, count}
        bounds.update(position for one in (*self.device, *self.host) for position in (one.first, one.end))
        bounds.update(at for step, (start, end) in enumerate(self.times) if end > start for at in (step, step + 1))
        self.bounds = sorted(bounds)

    def timeline(self) -> Timeline:
        at = {bound: index for index, bound in enumerate(self.bounds)}
        values = [Value("arguments and outputs", self.resident - self.constant_bytes, "", "", "", "argument")]
        if self.constant_bytes:
            values.append(Value("constants", self.constant_bytes, "", "", "", ""))
        stays = [Stay(number, "device", 0, len(self.bounds) - 1) for number in range(len(values))]
        places: tuple[tuple[Sequence[Lifetime], Place], ...] = ((self.device, "device"), (self.host, "host"))
        for where, place in places:
            for one in where:
                stays.append(Stay(len(values), place, at[one.first], at[one.end]))
                values.append(self._value(one))
        instants = tuple(self._instant(first, end) for first, end in pairwise(self.bounds))
        return Timeline("compiled", instants, tuple(values), tuple(stays), tuple(self._copies()), tuple(self._notes()))

    def _instant(self, first: int, end: int) -> Instant:
        name = self.names[first]
        waits = self.replay.clock.get(name) in self.replay.stalls
        doing: Doing = "wait" if waits else "recompute" if name != original(name) else "compute"
        return Instant(
            self.times[first][0],
            self.times[end - 1][1],
            self.resident + self.unused + self.live[first],
            self.unused,
            self.live_on_host[first],
            doing,
            "" if waits else original(name),
            layer_of(self.origins.scope(name)),
            self.origins.source(name),
        )

    def _value(self, one: Lifetime) -> Value:
        buffer = self.buffers[one.buffer]
        name = instruction_of(buffer)
        scope = self.origins.scope(name)
        return Value(
            layer_of(scope) or buffer,
            one.nbytes,
            self.origins.shape(buffer),
            layer_of(scope),
            self.origins.source(name),
            self._decision(buffer),
        )

    @functools.cached_property
    def _decided(self) -> Mapping[str, str]:
        return {instruction_of(buffer): decision for buffer, decision in self.decisions.items()}

    def _decision(self, buffer: str) -> str:
        return self.decisions.get(buffer) or self._decided.get(original(instruction_of(buffer)), "")

    def _copies(self) -> Iterator[Copy]:
        for one in self.replay.transfers:
            name = layer_of(self.origins.scope(one.name)) or original(one.name)
            yield Copy(name, one.nbytes, _DIRECTIONS[one.stream], one.start_s, one.end_s)

    def _notes(self) -> Iterator[str]:
        if any(name not in self.replay.clock for name in self.names):
            yield "A loop is drawn as one trip, stretched over all of them; copies of its body are not drawn."
