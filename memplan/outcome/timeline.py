"""A scheduled module -> memory over the step as report rows, by XLA's rules for buffers, at the times of the replay."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.packing import Lifetime
from memplan.report.timeline import Copy, Direction, Doing, Instant, Line, Place, Stay, Timeline, Value
from memplan.xla.module import Array, Module
from memplan.xla.replay import Traffic
from memplan.xla.sources import scopes, sources
from memplan.xla.write import original

_WRAPPED = re.compile(r"\b[\w.\-]+\(([^()]*)\)")
_CALLED = re.compile(r"\b(?:jit|pjit|shard_map)\([^()]*\)")
_NO_LAYER = re.compile(r"while|body|cond|closed_call|branch_\d+_fun|checkpoint|rematted_computation")
_LEAF = re.compile(r"(?P<name>[^{}]+)(?:\{(?P<index>[\d,]*)\})?")
_DIRECTIONS: Mapping[str, Direction] = {"out": "to host", "in": "to device", "net": "to devices"}


def layer_of(scope: str) -> str:
    """What of a name stack names a layer: `transpose(jvp(UNet))/down_0/down_0.norm/Conv_0` -> `UNet/down_0/Conv_0`."""
    scope = _CALLED.sub("", scope)
    while (bare := _WRAPPED.sub(r"\1", scope)) != scope:
        scope = bare
    parts: list[str] = []
    for part in scope.split("/"):
        method = parts and part.startswith(f"{parts[-1]}.")
        if part and not method and not _NO_LAYER.fullmatch(part):
            parts.append(part)
    return "/".join(parts)


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
        found = _LEAF.fullmatch(buffer.rpartition(":")[2])
        op = self._instructions.get(original(found["name"])) if found else None
        if op is None or found is None:
            return None
        number = int(found["index"].rpartition(",")[2]) if found["index"] else 0
        return op.result[number] if number < len(op.result) else None

    def shape(self, buffer: str) -> str:
        """As `float32[64,112]`, or ''."""
        array = self.array(buffer)
        return f"{array.numpy_name}[{','.join(map(str, array.dims))}]" if array else ""


def instruction_of(buffer: str) -> str:
    return buffer.rpartition(":")[2].partition("{")[0]


def timeline(reading: ScheduledModule, origins: Origins, decisions: Mapping[str, str]) -> Timeline:
    """Memory over a step, and what it does meanwhile; its peak is what XLA allocates.

    Args:
      origins: of what it was written from.
      decisions: by the names of the buffers of what was planned.
    """
    return _Drawn(reading, origins, decisions).timeline()


def line(name: str, drawn: Timeline) -> Line:
    """The device memory alone."""
    changes = [now for before, now in pairwise(drawn.instants) if now.device_bytes != before.device_bytes]
    shown = [*drawn.instants[:1], *changes]
    starts, nbytes = tuple(one.start_s for one in shown), tuple(one.device_bytes for one in shown)
    return Line(name, drawn.origin, starts, nbytes, drawn.end_s)


def at_peak(reading: ScheduledModule) -> list[Lifetime]:
    """Temporaries that are on the device where its memory is highest."""
    there, _ = _during(reading)
    live = list(accumulate(_changes(there, len(reading.problem.kernels))))
    peak = live.index(max(live))
    return [one for one in there if one.first <= peak < one.end]


def clock(names: Sequence[str], traffic: Traffic) -> list[tuple[float, float]]:
    """Start and end, in seconds on the compute stream, of every kernel of a problem.

    Those of a loop's body stand in front of the loop. They share its time in proportion to what they take, as if they
    ran once.
    """
    times: list[tuple[float, float]] = []
    inside: list[float] = []
    for name in names:
        if name not in traffic.clock:
            inside.append(traffic.seconds.get(name, 0.0))
            continue
        start, end = traffic.clock[name]
        if inside:
            scale = (end - start) / (sum(inside) or 1.0)
            edges = [start, *(start + scale * part for part in accumulate(inside))]
            times += pairwise(edges)
            start = edges[-1]
            inside = []
        times.append((start, end))
    return times + [(traffic.step_s, traffic.step_s)] * len(inside)


def _during(reading: ScheduledModule) -> tuple[list[Lifetime], list[Lifetime]]:
    """What takes memory while the step runs, on the device and on the host."""
    count = len(reading.problem.kernels)
    device, host = (
        [Lifetime(one.buffer, max(one.first, 0), min(one.end, count), one.nbytes) for one in where]
        for where in reading.lifetimes
    )
    return [one for one in device if one.nbytes and one.first < one.end], host


def _changes(where: Sequence[Lifetime], count: int) -> list[int]:
    change = [0] * (count + 1)
    for one in where:
        change[one.first] += one.nbytes
        change[one.end] -= one.nbytes
    return change


class _Drawn:
    def __init__(self, reading: ScheduledModule, origins: Origins, decisions: Mapping[str, str]):
        self.traffic, self.origins, self.decisions = reading.traffic, origins, decisions
        self.names = [kernel.name for kernel in reading.problem.kernels]
        self.buffers = [buffer.name for buffer in reading.problem.buffers]
        self.clock = clock(self.names, self.traffic)
        self.resident = reading.resident_bytes
        count = len(self.names)
        self.device, self.host = _during(reading)
        self.live, self.live_on_host = (list(accumulate(_changes(where, count))) for where in (self.device, self.host))
        self.unused = reading.packing.nbytes - max(self.live)
        cuts = {0, count}
        cuts.update(position for one in (*self.device, *self.host) for position in (one.first, one.end))
        cuts.update(at for step, (start, end) in enumerate(self.clock) if end > start for at in (step, step + 1))
        self.cuts = sorted(cuts)  # between two of them nothing changes

    def timeline(self) -> Timeline:
        number = {cut: index for index, cut in enumerate(self.cuts)}
        values = [Value("arguments and outputs", self.resident, "", "", "", "argument")]
        stays = [Stay(0, "device", 0, len(self.cuts) - 1)]
        places: tuple[tuple[Sequence[Lifetime], Place], ...] = ((self.device, "device"), (self.host, "host"))
        for where, place in places:
            for one in where:
                stays.append(Stay(len(values), place, number[one.first], number[one.end]))
                values.append(self._value(one))
        instants = tuple(self._instant(first, after) for first, after in pairwise(self.cuts))
        return Timeline("compiled", instants, tuple(values), tuple(stays), tuple(self._copies()), tuple(self._notes()))

    def _instant(self, first: int, after: int) -> Instant:
        name = self.names[first]
        waits = self.traffic.clock.get(name) in self.traffic.stalls
        doing: Doing = "wait" if waits else "recompute" if name != original(name) else "compute"
        return Instant(
            self.clock[first][0],
            self.clock[after - 1][1],
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
        for one in self.traffic.transfers:
            name = layer_of(self.origins.scope(one.name)) or original(one.name)
            yield Copy(name, one.nbytes, _DIRECTIONS[one.way], one.start_s, one.end_s)

    def _notes(self) -> Iterator[str]:
        if any(name not in self.traffic.clock for name in self.names):
            yield "A loop is drawn as one trip, stretched over all of them; copies of its body are not drawn."
