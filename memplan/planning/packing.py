"""Predicts the places that XLA gives the buffers of a schedule, and their bytes.

Follows XLA's `BufferAssigner` and `HeapSimulator`, in three steps:

1. Every donated argument is a place. From the largest buffer down, an output takes a free place of its size, or else
   becomes a place; any other buffer takes the smallest place that holds it and is free during its live range.
2. The remaining buffers are visited in time: a kernel overwrites an operand at its last read, if it may.
3. The others share one heap, placed by size or by live range, the largest first, each in the smallest gap that holds
   it (`GlobalDecreasingSizeBestFitHeap`, the better of its two orders: `ChooseBestHeapAlgorithm`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.liveness import Liveness, Version
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import Kind, Schedule, runs


@dataclass(frozen=True)
class Packing:
    """Bytes of a schedule."""

    nbytes: int  # of temporaries on the device, as XLA lays them out
    live_nbytes: int  # peak of the live temporaries
    reused_nbytes: int  # of buffers placed in donated arguments or outputs
    host_nbytes: int = 0  # of offloaded values, as XLA lays them out


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The actions `[first, end)` during which a buffer has its place; a buffer that overwrites it follows."""

    buffer: int
    first: int
    end: int
    nbytes: int


def pack(problem: Problem, schedule: Schedule | None = None) -> Packing:
    """Lay out a schedule; by default each kernel runs once, in the module's order."""
    return _Layout(problem, schedule).packing()


def live_nbytes(problem: Problem, schedule: Schedule | None = None) -> np.ndarray:
    """Bytes of live temporaries at each action, shape (actions,); without those placed in arguments and outputs."""
    layout = _Layout(problem, schedule)
    change = np.zeros(len(layout.schedule) + 2, np.int64)
    for one in layout.lifetimes():
        change[one.first] += one.nbytes
        change[one.end] -= one.nbytes
    return np.cumsum(change)[: len(layout.schedule)]


def lifetimes(problem: Problem) -> tuple[Sequence[Lifetime], Sequence[Lifetime]]:
    """Lifetimes of temporaries in the module's own order: on the device (those of `live_nbytes`), and on the host."""
    layout = _Layout(problem)
    return layout.lifetimes(), layout.on_host()


class _Layout:
    """The layout of one schedule."""

    def __init__(self, problem: Problem, schedule: Schedule | None = None) -> None:
        self._problem = problem
        self.schedule = runs(range(len(problem.kernels))) if schedule is None else schedule
        self._live = Liveness(problem, self.schedule)
        self._versions = self._live.versions
        self._position = _post_order(self._live)

    def packing(self) -> Packing:
        reused, left = self._reuse_places()
        groups = self._reuse_operands(left)
        tables, alignment = self._tables_nbytes(), self._problem.alignment
        nbytes = heap_nbytes(groups, self._position, alignment)
        if tables:  # behind the buffers, the first one aligned
            nbytes = -(-nbytes // alignment) * alignment
        # each memory space has a heap of its own (`AssignBuffersWithSequentialOrdering`)
        versions = self._live.on_host
        columns = ([one.start for one in versions], [one.end for one in versions], [one.nbytes for one in versions])
        start, end, sizes = (dict(enumerate(column)) for column in columns)
        on_host = Groups.of({number: number for number in start}, start, end, sizes)
        host = heap_nbytes(on_host, [self._position[version] for version in self._live.beside], alignment)
        return Packing(nbytes + tables, groups.live_nbytes() + tables, reused, host)

    def _tables_nbytes(self) -> int:
        """Bytes of tables: the module's, and an aligned one per copy and per repeated kernel with several results."""
        ran, found = set[int](), self._problem.tables_nbytes
        for time, action in enumerate(self.schedule):
            if action.kind in (Kind.OFFLOAD, Kind.PREFETCH):
                found += self._problem.alignment
            elif action.kind is Kind.RUN:
                found += self._problem.alignment * (action.number in ran and len(self._live.writes[time]) > 1)
                ran.add(action.number)
        return found

    def lifetimes(self) -> list[Lifetime]:
        _, left = self._reuse_places()
        groups = self._reuse_operands(left)
        found = []
        for group, numbers in groups.members.items():
            until = -1
            for version in sorted((self._versions[number] for number in numbers), key=lambda one: one.start):
                first, until = max(version.start, until), max(version.end + 1, until)
                found.append(Lifetime(version.buffer, first, until, groups.nbytes[group]))
        return found

    def on_host(self) -> list[Lifetime]:
        buffers = self._problem.buffers
        versions = (one for one in self._versions if buffers[one.buffer].role is Role.ON_HOST)
        return [Lifetime(one.buffer, one.start, one.end + 1, buffers[one.buffer].nbytes) for one in versions]

    def _nbytes(self, group: Iterable[int]) -> int:
        return max(self._versions[number].nbytes for number in group)

    def _reuse_places(self) -> tuple[int, list[list[int]]]:
        """Bytes placed in arguments and outputs, and the groups of versions that were not."""
        problem, groups = self._problem, self._live.groups
        buffers = {key: {self._versions[number].buffer for number in group} for key, group in groups.items()}
        roles = {key: {problem.buffers[one].role for one in inside} for key, inside in buffers.items()}
        returned = {key: not inside.isdisjoint(problem.returned) for key, inside in buffers.items()}
        # XLA numbers instructions of the entry first; those of computations inside have no position here
        made = {
            key: min((at for number in group if (at := self._position[number]) >= 0), default=len(self._versions))
            for key, group in groups.items()
        }
        places = _Places(self._versions, self._live.interfere)
        left, reused = [], 0
        order = sorted(groups, key=lambda key: (-self._nbytes(groups[key]), not returned[key], made[key], key))
        for key in order:
            group, nbytes = groups[key], self._nbytes(groups[key])
            if Role.ARGUMENT in roles[key]:
                if not buffers[key].isdisjoint(problem.donated):
                    places.open(nbytes, group)
                continue
            if Role.CONSTANT in roles[key] or Role.ON_HOST in roles[key] or not nbytes:
                continue
            if places.take(group, nbytes if returned[key] else None):
                reused += nbytes
            elif returned[key]:
                places.open(nbytes, group)
            else:
                left.append(sorted(group))
        return reused, left

    def _reuse_operands(self, left: list[list[int]]) -> Groups:
        """Visit versions in time, counted in events: kernels overwrite operands that end there."""
        group_of = {number: at for at, group in enumerate(left) for number in group}
        several = {number for group in left if len(group) > 1 for number in group}
        starts: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        for number in sorted(group_of, key=lambda n: (self._versions[n].start, self._versions[n].end, n)):
            starts[self._versions[number].start].append(number)
            ends[self._versions[number].end].append(number)
        clock, start, end, place = 0, {}, {}, {}
        for time in range(-1, len(self.schedule) + 1):
            for number in starts[time]:
                place[number] = group_of[number]
                if number not in several:
                    old = self._written_over(number, ends[time], several)
                    if old is not None:
                        ends[time].remove(old)
                        end[old] = clock
                        clock += 1
                        place[number] = place[old]
                start[number] = clock
                clock += 1
            for number in ends[time]:
                end[number] = clock
                clock += 1
        nbytes = {n: self._nbytes([n]) for n in group_of}
        return Groups.of(place, start, end, nbytes)

    def _written_over(self, number: int, ending: Sequence[int], several: set[int]) -> int | None:
        """The first operand that ends here and that the version may overwrite."""
        time = self._versions[number].start
        if time < 0:
            return None
        nbytes = self._versions[number].nbytes
        for old in self._live.reads[time]:
            same_size = self._versions[old].nbytes == nbytes
            if old in ending and old not in several and same_size and self._live.may_write_over(number, old):
                return old
        return None


def _post_order(live: Liveness) -> Sequence[int]:
    """Position of every version in XLA's walk from results to operands (`MakeInstructionPostOrder`)."""
    read = {number for reads in live.reads for number in reads}.union(live.outputs)
    unread = [writes[0] for writes in live.writes if writes and read.isdisjoint(writes)]
    position, count = [-1] * len(live.versions), 0
    waiting = [(number, False) for number in reversed(unread + live.outputs)]
    while waiting:
        number, seen = waiting.pop()
        time = live.versions[number].start
        if position[number] >= 0:
            continue
        if seen or time < 0:
            for one in live.writes[time] if seen else [number]:
                position[one] = count
            count += 1
        else:
            waiting.append((number, True))
            sources = [live.beside[live.fetched[number]]] if number in live.fetched else live.reads[time]
            waiting += ((source, False) for source in reversed(sources))
    return position


class _Places:
    """Places of arguments and outputs, the largest first, and the versions in each."""

    def __init__(self, versions: Sequence[Version], interfere: Callable[[int, int], bool]) -> None:
        self._versions, self._interfere = versions, interfere
        self._sizes: list[int] = []
        self._inside: list[list[int]] = []
        self._count = 0  # placed versions
        self._start, self._end, self._at = (np.zeros(len(versions), np.int64) for _ in range(3))

    def open(self, nbytes: int, group: Sequence[int]) -> None:
        """Add a place for these versions."""
        self._sizes.append(nbytes)
        self._inside.append([])
        self._put(len(self._sizes) - 1, group)

    def take(self, group: Sequence[int], nbytes: int | None) -> bool:
        """Put versions into the smallest place that is free for them; if `nbytes` is given, into one of that size."""
        blocked, touched = np.zeros(len(self._sizes), bool), np.zeros(len(self._sizes), bool)
        start, end, at = self._start[: self._count], self._end[: self._count], self._at[: self._count]
        for number in group:
            version = self._versions[number]
            touched[at[(start <= version.end) & (end >= version.start)]] = True
            blocked[at[(start < version.end) & (end > version.start)]] = True
        for place in np.flatnonzero(~blocked)[::-1].tolist():
            fits = nbytes is None or self._sizes[place] == nbytes
            pairs = ((one, other) for one in self._inside[place] for other in group)
            if fits and not (touched[place] and any(self._interfere(*pair) for pair in pairs)):
                self._put(place, group)
                return True
        return False

    def _put(self, place: int, group: Sequence[int]) -> None:
        self._inside[place] += group
        for number in group:
            version = self._versions[number]
            self._start[self._count], self._end[self._count] = version.start, version.end
            self._at[self._count] = place
            self._count += 1


@dataclass(frozen=True)
class Groups:
    """Versions that share a place of the heap, XLA's colocations."""

    members: dict[int, list[int]]  # of each group, by its first version
    # start, end: of versions, in events
    start: dict[int, int]
    end: dict[int, int]
    nbytes: dict[int, int]  # of groups

    @staticmethod
    def of(place: Mapping[int, int], start: dict[int, int], end: dict[int, int], nbytes: Mapping[int, int]) -> Groups:
        """Group the versions that share a place, ordered by start."""
        together: dict[int, list[int]] = defaultdict(list)
        for number in sorted(place, key=start.__getitem__):
            together[place[number]].append(number)
        members = {numbers[0]: numbers for numbers in together.values()}
        sizes = {first: max(nbytes[n] for n in numbers) for first, numbers in members.items()}
        return Groups(members, start, end, sizes)

    def span(self, group: int) -> int:
        """Events from the start of a group to its end."""
        numbers = self.members[group]
        return max(self.end[n] for n in numbers) - min(self.start[n] for n in numbers)

    def own_span(self, group: int) -> int:
        """Minus the lifetime of a group's first version: XLA's tie-breaker between equal sizes."""
        return self.start[group] - self.end[group]

    def live_nbytes(self) -> int:
        """Peak of the live bytes."""
        change = np.zeros(2 * len(self.start) + 2, np.int64)
        for group, numbers in self.members.items():
            until = 0
            for number in numbers:  # versions of a group that overlap count once
                first, until = max(self.start[number], until), max(self.end[number], until)
                change[first] += self.nbytes[group]
                change[until] -= self.nbytes[group]
        return int(np.cumsum(change).max())


def heap_nbytes(groups: Groups, position: Sequence[int], alignment: int) -> int:
    """Bytes of the smaller of XLA's two heaps; ties are placed by position."""
    by_size = _best_fit(groups, lambda g: (-groups.nbytes[g], groups.own_span(g), position[g], g), alignment)
    return _best_fit(groups, lambda g: (-groups.span(g), -groups.nbytes[g], position[g], g), alignment, by_size)


def _best_fit(groups: Groups, key: Callable[[int], tuple[int, ...]], alignment: int, most: float = math.inf) -> int:
    """Bytes of the heap if groups are placed in the order of the key; `most` if that is less."""
    count = sum(map(len, groups.members.values()))
    start, end = (np.zeros(count, np.int32) for _ in range(2))
    low, high = (np.zeros(count, np.int64) for _ in range(2))
    placed = top = 0
    for group in sorted(groups.members, key=key):
        nbytes = groups.nbytes[group]
        beside = np.zeros(placed, bool)
        for number in groups.members[group]:
            beside |= (start[:placed] <= groups.end[number]) & (end[:placed] >= groups.start[number])
        at = _smallest_gap(low[:placed][beside], high[:placed][beside], nbytes, alignment)
        for number in groups.members[group]:
            start[placed], end[placed] = groups.start[number], groups.end[number]
            low[placed], high[placed] = at, at + nbytes
            placed += 1
        top = max(top, at + nbytes)
        if top >= most:
            return int(most)
    return top


def _smallest_gap(low: np.ndarray, high: np.ndarray, nbytes: int, alignment: int) -> int:
    """The offset of the smallest gap that holds `nbytes`, the lowest of equal ones; without one, the heap's top."""
    if not len(low):
        return 0
    order = np.argsort(low)
    free = np.concatenate([[0], np.maximum.accumulate(-(-high[order] // alignment) * alignment)])
    gaps = low[order] - free[:-1]
    fitting = np.flatnonzero(gaps >= nbytes)
    return int(free[fitting[np.argmin(gaps[fitting])]] if len(fitting) else free[-1])
