"""Memory over the step as report rows: of a plan by the simulator, of an executable by the compiler's schedule."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from memplan.candidates import Candidate
from memplan.planning.devices import Device
from memplan.planning.graph import Graph, Op
from memplan.planning.lifetimes import Lifetimes, lifetimes
from memplan.planning.loop import moved_nbytes
from memplan.planning.plan import Kind
from memplan.planning.simulate import Simulator
from memplan.program import compat
from memplan.program.clock import clocked
from memplan.program.hlo import Buffer, Schedule
from memplan.program.targets import Executable
from memplan.report.timeline import Copy, Direction, Instant, Line, Stay, Timeline, Value
from memplan.xla.traffic import Traffic

_WRAPPED = re.compile(r"\b[\w.\-]+\(([^()]*)\)")
_CALLED = re.compile(r"\b(?:jit|pjit|shard_map)\([^()]*\)")
_NO_LAYER = re.compile(r"memplan\.\d+\.\d+|while|body|cond|closed_call|branch_\d+_fun|checkpoint|rematted_computation")
_WAYS: Mapping[str, Direction] = {"out": "to host", "in": "to device", "net": "to devices"}
_KINDS: Mapping[Kind, Direction] = {Kind.OFFLOAD: "to host", Kind.PREFETCH: "to device"}


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


def simulated(chosen: Candidate, graph: Graph, device: Device, decision: Mapping[int, str]) -> Timeline:
    """Of a plan, whose peak is the predicted one. `decision` of those values on which one was taken."""
    assert chosen.plan is not None
    found = lifetimes(Simulator(graph, device, chosen.slack), chosen.plan)
    own = graph.returned.difference(graph.reused, graph.inputs)
    always = {**dict.fromkeys(graph.inputs, "argument"), **dict.fromkeys(sorted(own), "output")}
    always = {value: why for value, why in always.items() if graph.nbytes(value)}
    listed = {value: index for index, value in enumerate([*always, *dict.fromkeys(s.value for s in found.lifetimes)])}
    whole = len(found.instants)
    held = _held_nbytes(chosen)
    values = [_value(graph, value, always.get(value) or decision.get(value, "")) for value in listed]
    stays = [Stay(listed[value], "device", 0, whole) for value in always]
    stays += [Stay(listed[s.value], "host" if s.on_host else "device", s.first, s.last) for s in found.lifetimes]
    if held:
        stays.append(Stay(len(values), "host", 0, whole))
        values.append(Value("state on the host", held, "", "", "", "argument"))
    return Timeline(
        "simulated",
        tuple(_instants(found, graph, held)),
        tuple(values),
        tuple(stays),
        tuple(_copies(found, graph)),
        tuple(_notes(chosen)),
    )


def _instants(found: Lifetimes, graph: Graph, held: int) -> Iterator[Instant]:
    for one in found.instants:
        op = graph.ops[one.op] if one.op >= 0 else Op("", (), ())
        yield Instant(
            one.start_s,
            one.end_s,
            one.device_nbytes,
            one.extra_nbytes,
            one.host_nbytes + held,
            "wait" if one.op < 0 else "recompute" if one.again else "compute",
            op.name,
            layer_of(op.scope),
            op.source,
        )


def _value(graph: Graph, value: int, decision: str) -> Value:
    known, made = graph.values[value], graph.producer[value]
    op = graph.ops[made] if made is not None else Op("", (), ())
    shape = f"{known.dtype}[{','.join(map(str, known.shape))}]"
    return Value(known.name, known.nbytes, shape, layer_of(op.scope), op.source, decision)


def _copies(found: Lifetimes, graph: Graph) -> Iterator[Copy]:
    for copy in sorted(found.timeline.copies, key=lambda copy: copy.start_s):
        known = graph.values[copy.value]
        yield Copy(known.name, known.nbytes, _KINDS[copy.direction], copy.start_s, copy.end_s)


def _held_nbytes(chosen: Candidate) -> int:
    """Bytes of the state that is on the host during the whole step."""
    if chosen.program is None:
        return 0
    inputs = chosen.program.jaxpr.jaxpr.invars
    return sum(compat.nbytes_of(inputs[position].aval) for position in chosen.program.held)


def _notes(chosen: Candidate) -> Iterator[str]:
    loops = chosen.program.loops if chosen.program is not None else ()
    if loops:
        yield "A loop is one operation here: what one of its trips needs is scratch memory, what it stacks is a value."
    moved = sum(known[0].runs * moved_nbytes(*known) for known in loops)
    if moved:
        yield f"{moved} bytes that loops stack on the host, and their copies, are not drawn."


def compiled(one: Candidate) -> Timeline | None:
    """Of an executable, whose peak is the compiled one; None where the compiler tells no schedule."""
    if one.executable is None or one.executable.schedule is None or one.traffic is None:
        return None
    drawn = _Compiled(one.executable, one.executable.schedule, one.traffic)
    return drawn.timeline() if drawn.schedule.steps else None


def line(name: str, timeline: Timeline | None) -> Iterator[Line]:
    """The device memory of a timeline alone."""
    if timeline is None:
        return
    first = timeline.instants[:1]
    changes = [now for before, now in pairwise(timeline.instants) if now.device_bytes != before.device_bytes]
    shown = [*first, *changes]
    yield Line(
        name,
        timeline.origin,
        tuple(one.start_s for one in shown),
        tuple(one.device_bytes for one in shown),
        timeline.end_s,
    )


def _instruction(buffer: Buffer) -> str:
    return buffer.name.partition("{")[0]


class _Compiled:
    """An executable's buffers over its schedule, at the times of its replay."""

    def __init__(self, executable: Executable, schedule: Schedule, traffic: Traffic):
        self.schedule, self.traffic = schedule, traffic
        memory, count = executable.memory, len(schedule.steps)
        self.clock = clocked(schedule, traffic)
        self.buffers = [b for b in schedule.buffers if b.temporary and b.nbytes and b.start < count]
        self.places: dict[int, list[Buffer]] = defaultdict(list)
        for buffer in self.buffers:
            self.places[buffer.offset].append(buffer)
        self.resident = memory.resident_bytes
        self.unused = max(0, memory.temp_bytes - max(schedule.live_nbytes, default=0))  # gaps in XLA's heap
        self.held = max(0, memory.host_bytes - max(schedule.host_live_nbytes, default=0))
        cuts = {0, count}
        cuts.update(step for b in self.buffers for step in (b.start, min(b.end + 1, count)))
        cuts.update(place for step, (start, end) in enumerate(self.clock) if end > start for place in (step, step + 1))
        self.cuts = sorted(cuts)  # between two of them nothing changes

    def timeline(self) -> Timeline:
        number = {cut: index for index, cut in enumerate(self.cuts)}
        whole, count = len(self.cuts) - 1, len(self.schedule.steps)
        values = [Value("arguments and outputs", self.resident, "", "", "", "argument")]
        stays = [Stay(0, "device", 0, whole)]
        if self.held:
            stays.append(Stay(len(values), "host", 0, whole))
            values.append(Value("arguments and outputs on the host", self.held, "", "", "", "argument"))
        for b in self.buffers:
            place = "host" if b.on_host else "device"
            stays.append(Stay(len(values), place, number[b.start], number[min(b.end + 1, count)]))
            values.append(self._value(b))
        instants = tuple(self._instant(first, after) for first, after in pairwise(self.cuts))
        return Timeline("compiled", instants, tuple(values), tuple(stays), tuple(self._copies()), tuple(self._notes()))

    def _instant(self, first: int, after: int) -> Instant:
        name, schedule = self.schedule.steps[first], self.schedule
        layer, _, operation = self._path(name).rpartition("/")
        waits = self.traffic.clock.get(name) in self.traffic.stalls
        return Instant(
            self.clock[first][0],
            self.clock[after - 1][1],
            self.resident + self.unused + schedule.live_nbytes[first],
            self.unused,
            self.held + schedule.host_live_nbytes[first],
            "wait" if waits else "compute",
            "" if waits else operation or name,
            layer_of(layer),
            schedule.sources.get(name, ""),
        )

    def _value(self, buffer: Buffer) -> Value:
        name = _instruction(buffer)
        if not self._path(name):  # what a loop hands on: named by whoever has the place before or after it
            near = (b for b in self.places[buffer.offset] if b.start == buffer.end + 1 or b.end == buffer.start - 1)
            name = next((_instruction(b) for b in near if self._path(_instruction(b))), name)
        path = self._path(name)
        layer = layer_of(path.rpartition("/")[0])
        return Value(path or buffer.name, buffer.nbytes, buffer.shape, layer, self.schedule.sources.get(name, ""), "")

    def _copies(self) -> Iterator[Copy]:
        for one in self.traffic.transfers:
            yield Copy(self._path(one.name) or one.name, one.nbytes, _WAYS[one.way], one.start_s, one.end_s)

    def _path(self, name: str) -> str:
        return self.schedule.paths.get(name, "")

    def _notes(self) -> Iterator[str]:
        if any(name not in self.traffic.clock for name in self.schedule.steps):
            yield "A loop is drawn as one trip, stretched over all of them; copies of its body are not drawn."
