"""Races in a log of the stand-in driver: accesses to one byte, one of them a write, that nothing orders.

An operation ends before another one begins where a stream, an event or a host thread makes it so:

- a stream runs what it is given in the order of submission,
- a stream that waits for an event runs behind what the event's stream had been given when the event was recorded,
- a thread that synchronizes with a stream or an event has seen their end: what it submits from then on runs behind,
- a node of a graph runs behind the nodes that it depends on; the graph as a whole is one operation of its stream,
- a host function has seen the end of what its stream was given before it, and tells all threads when it begins: whom it
  tells is not in the log. (XLA fetches an array once a host function has told that it is there.)

Other talk between host threads orders nothing. Pageable memory is left out: its copies are done with it when the call
returns.

Vector clocks hold the order: how much of every other stream an operation, or a thread, has seen. One pass over the log
keeps for every byte the last write, and the reads since that nothing orders among themselves; a byte has a race if and
only if one is found there (FastTrack: Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.gpu_runtime.operations import Access, Kind, Op, operations

Clock = Mapping[int, int]  # stream -> how many of its operations are over


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations that access bytes [start, stop), in either order; the first was submitted first."""

    first: Op
    second: Op
    start: int
    stop: int

    def __str__(self) -> str:
        first, second = (
            f"{op.name} (line {op.line}, s{op.stream})" for op in (self.first, self.second)
        )
        return f"{first} and {second}: {self.stop - self.start} bytes at {self.start:#x}"


@dataclass(frozen=True, slots=True)
class _Stamp:
    """An operation is the `tick`-th of its stream; of a graph's node, `behind` has the bits of the nodes before it."""

    op: Op
    tick: int
    clock: Clock
    behind: int

    def over_before(self, stamp: _Stamp) -> bool:
        if self.op.stream == stamp.op.stream:
            same_launch = self.op.launch is not None and self.op.launch == stamp.op.launch
            return not same_launch or bool(stamp.behind >> self.op.node & 1)
        return stamp.clock.get(self.op.stream, 0) >= self.tick


@dataclass(slots=True)
class _Cell:
    """Bytes up to `stop` that have one last write and the same reads since."""

    stop: int
    write: _Stamp | None = None
    reads: list[_Stamp] = field(default_factory=list)


class _Memory:
    """Disjoint cells, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: list[_Cell] = []

    def access(self, access: Access, stamp: _Stamp) -> Iterator[Race]:
        """Remember an access; its races with earlier ones."""
        low, high = self._range(access.start, access.stop)
        cells = list(zip(self._starts[low:high], self._cells[low:high], strict=True))
        for start, cell in cells:
            for earlier in (cell.write, *(cell.reads if access.write else ())):
                if (
                    earlier is not None
                    and earlier.op is not stamp.op
                    and not earlier.over_before(stamp)
                ):
                    yield Race(earlier.op, stamp.op, start, cell.stop)
        written = [(access.start, _Cell(access.stop, stamp))]
        cells = written if access.write else list(_with_read(cells, access, stamp))
        self._starts[low:high] = [start for start, _ in cells]
        self._cells[low:high] = [cell for _, cell in cells]

    def forget(self, start: int, stop: int) -> None:
        low, high = self._range(start, stop)
        del self._starts[low:high], self._cells[low:high]

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Numbers of the cells in [start, stop), once no cell reaches over either end."""
        for at in (start, stop):
            number = bisect_left(self._starts, at)
            if number and self._cells[number - 1].stop > at:
                cell = self._cells[number - 1]
                self._starts.insert(number, at)
                self._cells.insert(number, _Cell(cell.stop, cell.write, list(cell.reads)))
                cell.stop = at
        return bisect_left(self._starts, start), bisect_left(self._starts, stop)


def _with_read(
    cells: Sequence[tuple[int, _Cell]], read: Access, stamp: _Stamp
) -> Iterator[tuple[int, _Cell]]:
    """Cells that cover what is read, each with the read; earlier reads that are over before it tell nothing more."""
    reached = read.start
    for start, cell in cells:
        if reached < start:
            yield reached, _Cell(start, reads=[stamp])
        cell.reads = [*(reader for reader in cell.reads if not reader.over_before(stamp)), stamp]
        yield start, cell
        reached = cell.stop
    if reached < read.stop:
        yield reached, _Cell(read.stop, reads=[stamp])


@dataclass(slots=True)
class _Timeline:
    """Operations of a stream: their numbers, ascending, and what each has seen of other streams."""

    numbers: list[int] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)

    def add(self, number: int, clock: Clock) -> int:
        self.numbers.append(number)
        self.clocks.append(clock)
        return len(self.numbers)

    @property
    def clock(self) -> Clock:
        return self.clocks[-1] if self.clocks else {}

    def seen_with(self, clock: Clock, stream: int, number: int) -> Clock:
        """A clock that has also seen this stream's operations up to that number."""
        tick = bisect_right(self.numbers, number)
        return _join(clock, {**self.clocks[tick - 1], stream: tick}) if tick else clock


def races(ops: Sequence[Op]) -> Iterator[Race]:
    """Accesses that nothing orders, in the order of the second."""
    streams = {op.stream: _Timeline() for op in ops}
    threads: dict[int, Clock] = {op.thread: {} for op in ops}
    host_clock: Clock = {}
    marks: dict[
        int, tuple[int, int]
    ] = {}  # recordings of events: stream and number of the operation
    homes: dict[int, int] = {}  # number of an operation -> stream
    graphs: dict[int, list[int]] = {}  # launches: of every node, the bits of those before it
    memory = _Memory()
    for op in ops:
        timeline = streams[op.stream]
        match op.kind:
            case Kind.FREE:
                for freed in op.accesses:
                    memory.forget(freed.start, freed.stop)
            case Kind.SYNC:
                threads[op.thread] = timeline.seen_with(threads[op.thread], op.stream, op.number)
            case Kind.TOLD:
                host_clock = timeline.seen_with(host_clock, op.stream, op.number)
            case Kind.SEEN:
                stream, number = marks[op.mark]
                threads[op.thread] = streams[stream].seen_with(threads[op.thread], stream, number)
            case Kind.WORK if op.after_nodes:
                tick, nodes = len(timeline.numbers), graphs[op.launch or 0]
                behind = 0
                for node in op.after_nodes:
                    behind |= nodes[node] | 1 << node
                nodes.append(behind)
                for access in op.accesses:
                    yield from memory.access(access, _Stamp(op, tick, timeline.clock, behind))
            case _:
                clock = _join(_join(timeline.clock, threads[op.thread]), host_clock)
                waited = [marks[op.mark]] if op.kind is Kind.WAIT else []
                for stream, number in waited + [(homes[number], number) for number in op.after]:
                    clock = streams[stream].seen_with(clock, stream, number)
                tick = timeline.add(op.number, clock)
                homes[op.number] = op.stream
                if op.kind is Kind.RECORD:
                    marks[op.mark] = op.stream, op.number
                if op.launch is not None:
                    graphs[op.launch] = [0]
                for access in op.accesses:
                    yield from memory.access(access, _Stamp(op, tick, clock, 0))


def _join(clock: Clock, second_clock: Clock) -> Clock:
    """The first, itself where the other one has seen nothing more: most operations share their predecessor's."""
    more = {stream: tick for stream, tick in second_clock.items() if clock.get(stream, 0) < tick}
    return {**clock, **more} if more else clock


def main() -> int:
    """`python -m tests.gpu_runtime.races LOG`: print the races; 1 where there are some."""
    conflicts = list(races(operations(sys.argv[1])))
    print(*conflicts, f"{len(conflicts)} races", sep="\n")
    return bool(conflicts)


if __name__ == "__main__":
    sys.exit(main())
