"""Memory over the step as rows of a report: by XLA's rules for buffers, at the times of the replay."""

import re
from collections.abc import Iterator, Mapping, Sequence
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
    Place,
    Stay,
    Timeline,
    Value,
)
from memplan.xla.buffers import instruction_of, leaf_of
from memplan.xla.module import Module
from memplan.xla.replay import Replay
from memplan.xla.shapes import Array
from memplan.xla.sources import Sources, layer_of
from memplan.xla.write import original

_DIRECTIONS: Mapping[str, Direction] = {"out": "to host", "in": "to device", "net": "to devices"}
_SLABS = re.compile(r"(^|/)slabs_\d+$")  # the end of a loop's scope: `InSlabs.scope`
_LOOPS = "A loop is drawn as one trip, stretched over all of them; copies of its body are not drawn."


class Origins:
    """Maps instructions of a module to the user's code, including those that memplan wrote into it."""

    def __init__(self, base: Module):  # the module that was planned, whose metadata names sources
        self._module, self._sources = base, Sources(base)

    def source(self, buffer: str) -> str:
        """`file:line` of what makes a buffer `instruction{leaf}`, or ''."""
        return self._sources.line(*_result(buffer))

    def scope(self, buffer: str) -> str:
        """jax's name stack of it, or ''."""
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
    """The instruction of the planned module whose result is in a buffer, and the leaf of the result."""
    return original(instruction_of(buffer)), leaf_of(buffer)


def timeline(scheduled: ScheduledModule, origins: Origins, decisions: Mapping[str, str]) -> Timeline:
    """Memory and work over a step; the peak is what XLA allocates.

    Args:
      origins: of the module that was planned.
      decisions: by the names of that module's buffers.
    """
    replay, buffers = scheduled.replay, scheduled.problem.buffers
    names = [kernel.name for kernel in scheduled.problem.kernels]
    times = _kernel_times(names, replay)
    device, host = _step_lifetimes(scheduled)
    live, live_on_host = (list(accumulate(_changes(where, len(names)))) for where in (device, host))
    unused = scheduled.packing.nbytes - max(live)
    # Nothing changes between two adjacent positions.
    positions = {0, len(names)}
    positions.update(position for one in (*device, *host) for position in (one.first, one.end))
    positions.update(at for step, (start, end) in enumerate(times) if end > start for at in (step, step + 1))
    bounds = sorted(positions)
    decided = {instruction_of(buffer): decision for buffer, decision in decisions.items()}
    moved = {instruction_of(buffer): buffer for buffer, decision in decisions.items() if decision == "offload"}

    def instant(first: int, end: int) -> Instant:
        name = names[first]
        waits = replay.clock.get(name) in replay.stalls
        doing: Doing = "wait" if waits else "recompute" if name != original(name) else "compute"
        return Instant(
            times[first][0],
            times[end - 1][1],
            scheduled.resident_bytes + unused + live[first],
            unused,
            live_on_host[first],
            doing,
            "" if waits else original(name),
            layer_of(origins.scope(name)),
            origins.source(name),
        )

    def value(one: Lifetime) -> Value:
        buffer = buffers[one.buffer].name
        layer, made = layer_of(origins.scope(buffer)), original(instruction_of(buffer))
        decision = decisions.get(buffer) or decided.get(made, "")
        planned = buffer.replace(instruction_of(buffer), made)  # where it is repeated; a copy does not name its leaf
        home = planned if planned in decisions else moved.get(made, planned)
        return Value(layer or buffer, one.nbytes, origins.shape(buffer), layer, origins.source(buffer), decision, home)

    resident = scheduled.resident_bytes - scheduled.constant_bytes
    values = [Value("arguments and outputs", resident, "", "", "", "argument")]
    if scheduled.constant_bytes:
        values.append(Value("constants", scheduled.constant_bytes, "", "", "", ""))
    stays = [Stay(number, "device", 0, len(bounds) - 1) for number in range(len(values))]
    places: tuple[tuple[Sequence[Lifetime], Place], ...] = ((device, "device"), (host, "host"))
    at = {bound: index for index, bound in enumerate(bounds)}
    for where, place in places:
        for one in where:
            stays.append(Stay(len(values), place, at[one.first], at[one.end]))
            values.append(value(one))
    copies = tuple(
        Copy(
            layer_of(origins.scope(one.name)) or original(one.name),
            one.nbytes,
            _DIRECTIONS[one.stream],
            one.start_s,
            one.end_s,
            scheduled.module.instructions[one.name].opcode.removesuffix("-start") if one.stream == "net" else "",
        )
        for one in replay.transfers
    )
    instants = tuple(instant(first, end) for first, end in pairwise(bounds))
    is_whole = all(name in replay.clock for name in names)
    notes, blocks = () if is_whole else (_LOOPS,), tuple(_blocks(scheduled, origins))
    return Timeline("compiled", instants, tuple(values), tuple(stays), copies, notes, blocks)


def _blocks(scheduled: ScheduledModule, origins: Origins) -> Iterator[Block]:
    """Loops and conditionals of the entry."""
    kind: BlockKind
    for op in scheduled.module.entry.ops.values():
        if op.opcode not in ("while", "conditional"):
            continue
        name = layer_of(origins.scope(op.name)) or op.name
        if op.opcode == "conditional":
            kind, count = "branches", len(op.called)
        else:
            kind, count = "slabs" if _SLABS.search(origins.scope(op.name)) else "loop", op.trip_count
        yield Block(kind, name, count, *scheduled.replay.clock[op.name], origins.source(op.name))


def line(name: str, memory: Timeline) -> Line:
    """The device memory of a timeline."""
    changes = [now for before, now in pairwise(memory.instants) if now.device_bytes != before.device_bytes]
    shown = [*memory.instants[:1], *changes]
    starts, nbytes = tuple(one.start_s for one in shown), tuple(one.device_bytes for one in shown)
    return Line(name, memory.origin, starts, nbytes, memory.end_s)


def peak_lifetimes(scheduled: ScheduledModule) -> list[Lifetime]:
    """Lifetimes of the temporaries that are on the device at its peak."""
    device, _ = _step_lifetimes(scheduled)
    live = list(accumulate(_changes(device, len(scheduled.problem.kernels))))
    peak = live.index(max(live))
    return [one for one in device if one.first <= peak < one.end]


def _kernel_times(names: Sequence[str], replay: Replay) -> list[tuple[float, float]]:
    """Start and end of every kernel of a problem, in seconds on the compute stream.

    Kernels of a loop's body come before the loop, and share its time in proportion to their own, as if they ran once.
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
    """Lifetimes of buffers during the step, on the device and on the host."""
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
