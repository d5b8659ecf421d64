"""The timeline of a report: XLA's buffers at the times of the replay."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from memplan.compilation.scheduled import ScheduledModule
from memplan.planning.packing import Lifetime
from memplan.report.timeline import (
    Block,
    BlockKind,
    Copy,
    Direction,
    Doing,
    Instant,
    Line,
    MemoryKind,
    Stay,
    Timeline,
    TimelineValue,
)
from memplan.xla.buffers import instruction_of, leaf_of
from memplan.xla.module import Module
from memplan.xla.replay import Replay
from memplan.xla.shapes import Array
from memplan.xla.sources import Sources, layer_of
from memplan.xla.write import original

_DIRECTIONS: Mapping[str, Direction] = {"out": "to host", "in": "to device", "net": "to devices"}
_SLABS = re.compile(r"(^|/)slabs_\d+$")  # the end of a loop's scope: `InSlabs.scope`
_LOOPS_NOTE = (
    "A loop is drawn as one trip, stretched over all of them; copies of its body are not drawn."
)


class Origins:
    """Maps instructions of a module, or of one that memplan wrote from it, to the user's code."""

    def __init__(self, base: Module):
        self._module = base
        self._sources = Sources(base)

    def source(self, buffer: str) -> str:
        """`file:line` of the maker of a buffer `instruction{leaf}`, or ''."""
        return self._sources.line(*_result(buffer))

    def scope(self, buffer: str) -> str:
        """jax's name stack of the maker, or ''."""
        return self._sources.scope(*_result(buffer))

    def array(self, buffer: str) -> Array | None:
        """The array in it."""
        name, leaf = _result(buffer)
        op = self._module.instructions.get(name)
        return op.result[leaf] if op is not None and leaf < len(op.result) else None

    def shape(self, buffer: str) -> str:
        """Type and shape, such as `float32[64,112]`, or ''."""
        array = self.array(buffer)
        return array.in_numpy if array else ""


def _result(buffer: str) -> tuple[str, int]:
    """The instruction of the planned module that makes a buffer, and the leaf of its result."""
    return original(instruction_of(buffer)), leaf_of(buffer)


def timeline(
    scheduled: ScheduledModule, origins: Origins, decisions: Mapping[str, str]
) -> Timeline:
    """Memory and work over a step; the peak is what XLA allocates.

    Args:
      origins: of the module that was planned.
      decisions: by the names of that module's buffers.
    """
    replay = scheduled.replay
    names = [kernel.name for kernel in scheduled.problem.kernels]
    device, host = _step_lifetimes(scheduled)
    # Between two adjacent bounds, no buffer starts or ends, and time passes in at most one kernel.
    times = _kernel_times(names, replay)
    positions = {0, len(names)}
    for lifetime in (*device, *host):
        positions.update((lifetime.first, lifetime.end))
    for number, (start_s, end_s) in enumerate(times):
        if end_s > start_s:
            positions.update((number, number + 1))
    bounds = sorted(positions)
    values, stays = _values(scheduled, origins, decisions, device, host, bounds)
    return Timeline(
        origin="compiled",
        instants=tuple(_instants(scheduled, origins, device, host, bounds, times)),
        values=values,
        stays=stays,
        copies=tuple(_copies(scheduled, origins)),
        notes=() if all(name in replay.spans for name in names) else (_LOOPS_NOTE,),
        blocks=tuple(_blocks(scheduled, origins)),
    )


def _instants(
    scheduled: ScheduledModule,
    origins: Origins,
    device: Sequence[Lifetime],
    host: Sequence[Lifetime],
    bounds: Sequence[int],
    times: Sequence[tuple[float, float]],
) -> Iterator[Instant]:
    """The spans between positions in the order of kernels.

    Args:
      times: start and end of each kernel, in seconds.
    """
    replay = scheduled.replay
    kernels = scheduled.problem.kernels
    device_nbytes = list(accumulate(_changes(device, len(kernels))))
    host_nbytes = list(accumulate(_changes(host, len(kernels))))
    unused = scheduled.packing.nbytes - max(device_nbytes)
    for first, end in pairwise(bounds):
        name = kernels[first].name
        waits = replay.spans.get(name) in replay.stalls
        doing: Doing = "compute" if name == original(name) else "recompute"
        yield Instant(
            start_s=times[first][0],
            end_s=times[end - 1][1],
            device_bytes=scheduled.resident_bytes + unused + device_nbytes[first],
            other_bytes=unused,
            host_bytes=host_nbytes[first],
            doing="wait" if waits else doing,
            name="" if waits else original(name),
            layer=layer_of(origins.scope(name)),
            source=origins.source(name),
        )


def _values(
    scheduled: ScheduledModule,
    origins: Origins,
    decisions: Mapping[str, str],
    device: Sequence[Lifetime],
    host: Sequence[Lifetime],
    bounds: Sequence[int],
) -> tuple[tuple[TimelineValue, ...], tuple[Stay, ...]]:
    """The arrays in memory, and the instants of their stays."""
    resident = scheduled.resident_bytes - scheduled.constant_bytes
    values = [TimelineValue("arguments and outputs", resident, "", "", "", "argument")]
    if scheduled.constant_bytes:
        values.append(TimelineValue("constants", scheduled.constant_bytes, "", "", "", ""))
    stays = [Stay(number, "device", 0, len(bounds) - 1) for number in range(len(values))]
    instants = {bound: index for index, bound in enumerate(bounds)}
    planned = _PlannedBuffers(decisions)
    for number, lifetime in enumerate((*device, *host)):
        memory: MemoryKind = "device" if number < len(device) else "host"
        first = instants[lifetime.first]
        stays.append(Stay(len(values), memory, first, instants[lifetime.end]))
        buffer = scheduled.problem.buffers[lifetime.buffer].name
        layer = layer_of(origins.scope(buffer))
        value = TimelineValue(
            name=layer or buffer,
            nbytes=lifetime.nbytes,
            shape=origins.shape(buffer),
            layer=layer,
            source=origins.source(buffer),
            decision=planned.decision(buffer),
            buffer=planned.name(buffer),
        )
        values.append(value)
    return tuple(values), tuple(stays)


class _PlannedBuffers:
    """Maps buffers of the compiled module to those of the planned one, and to their decisions."""

    def __init__(self, decisions: Mapping[str, str]):
        self._decisions = decisions
        self._by_instruction = {
            instruction_of(buffer): decision for buffer, decision in decisions.items()
        }
        self._offloaded = {
            instruction_of(buffer): buffer
            for buffer, decision in decisions.items()
            if decision == "offload"
        }

    def decision(self, buffer: str) -> str:
        """The decision about a buffer, or else about its instruction; '' if there is none."""
        maker = original(instruction_of(buffer))
        return self._decisions.get(buffer) or self._by_instruction.get(maker, "")

    def name(self, buffer: str) -> str:
        """The name of a buffer, even a recomputed one or a copy, in the planned module."""
        maker = original(instruction_of(buffer))
        name = buffer.replace(instruction_of(buffer), maker)
        if name in self._decisions:
            return name
        return self._offloaded.get(maker, name)  # the name of a copy has no leaf


def _copies(scheduled: ScheduledModule, origins: Origins) -> Iterator[Copy]:
    for transfer in scheduled.replay.transfers:
        kind = ""
        if transfer.stream == "net":
            kind = scheduled.module.instructions[transfer.name].opcode.removesuffix("-start")
        yield Copy(
            name=layer_of(origins.scope(transfer.name)) or original(transfer.name),
            nbytes=transfer.nbytes,
            direction=_DIRECTIONS[transfer.stream],
            start_s=transfer.start_s,
            end_s=transfer.end_s,
            kind=kind,
            over=transfer.over,
            source=origins.source(transfer.name),
        )


def _blocks(scheduled: ScheduledModule, origins: Origins) -> Iterator[Block]:
    """Loops and conditionals of the entry."""
    for op in scheduled.module.entry.ops.values():
        if op.opcode not in ("while", "conditional"):
            continue
        scope = origins.scope(op.name)
        kind: BlockKind = "slabs" if _SLABS.search(scope) else "loop"
        count = op.trip_count
        if op.opcode == "conditional":
            kind = "branches"
            count = len(op.called)
        start_s, end_s = scheduled.replay.spans[op.name]
        yield Block(
            kind, layer_of(scope) or op.name, count, start_s, end_s, origins.source(op.name)
        )


def line(name: str, memory: Timeline) -> Line:
    """The device memory of a timeline."""
    pairs = pairwise(memory.instants)
    changes = [after for before, after in pairs if after.device_bytes != before.device_bytes]
    instants = [*memory.instants[:1], *changes]
    return Line(
        name=name,
        origin=memory.origin,
        starts_s=tuple(instant.start_s for instant in instants),
        device_bytes=tuple(instant.device_bytes for instant in instants),
        end_s=memory.end_s,
    )


def peak_lifetimes(scheduled: ScheduledModule) -> list[Lifetime]:
    """Lifetimes of the temporaries that are on the device at its peak."""
    device, _ = _step_lifetimes(scheduled)
    live = list(accumulate(_changes(device, len(scheduled.problem.kernels))))
    peak = live.index(max(live))
    return [lifetime for lifetime in device if lifetime.first <= peak < lifetime.end]


def workspace_at_peak(scheduled: ScheduledModule) -> Mapping[str, int]:
    """Bytes of libraries' workspace on the device at its peak, by kernel."""
    nbytes: dict[str, int] = {}
    for lifetime in peak_lifetimes(scheduled):
        buffer = scheduled.problem.buffers[lifetime.buffer].name
        name = instruction_of(buffer)
        if name in scheduled.workspaces:
            op = scheduled.module.instructions[name]
            if leaf_of(buffer) == len(op.result) - 1:
                nbytes[name] = scheduled.workspaces[name]
    return nbytes


def _kernel_times(names: Sequence[str], replay: Replay) -> list[tuple[float, float]]:
    """Start and end of every kernel of a problem, in seconds on the compute stream.

    Kernels of a loop's body precede the loop, and divide its time in proportion to their own.
    """
    times: list[tuple[float, float]] = []
    body: list[float] = []
    for name in names:
        if name not in replay.spans:
            body.append(replay.seconds.get(name, 0.0))
            continue
        start, end = replay.spans[name]
        if body:
            scale = (end - start) / (sum(body) or 1.0)
            edges = [start, *(start + scale * part for part in accumulate(body))]
            times += pairwise(edges)
            start = edges[-1]
            body = []
        times.append((start, end))
    return times + [(replay.step_s, replay.step_s)] * len(body)


def _step_lifetimes(scheduled: ScheduledModule) -> tuple[list[Lifetime], list[Lifetime]]:
    """Lifetimes of buffers during the step, on the device and on the host."""
    count = len(scheduled.problem.kernels)
    device, host = (
        [
            replace(lifetime, first=max(lifetime.first, 0), end=min(lifetime.end, count))
            for lifetime in lifetimes
        ]
        for lifetimes in scheduled.lifetimes
    )
    return [
        lifetime for lifetime in device if lifetime.nbytes and lifetime.first < lifetime.end
    ], host


def _changes(lifetimes: Sequence[Lifetime], count: int) -> list[int]:
    """By how many bytes each position changes memory."""
    changes = [0] * (count + 1)
    for lifetime in lifetimes:
        changes[lifetime.first] += lifetime.nbytes
        changes[lifetime.end] -= lifetime.nbytes
    return changes
