"""Where XLA puts the buffers of a schedule, and how many bytes that takes.

Sources: `BufferAssigner` and `HeapSimulator` (`GlobalDecreasingSizeBestFitHeap`, the better of its two orders).
Three steps, as there:

1. Every donated argument is a place, every output one of its own. From the largest buffer down, each takes the smallest
   of these places that holds it and is free for as long as it is there.
2. What is left is walked through in time: a kernel writes over what it reads for the last time, where it may.
3. The others go into one heap, the largest first, or the longest first, each into the smallest gap that holds it.

What comes back from the host is a buffer of its own that no kernel writes over, being an element of a tuple.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.problem import Kernel, Problem, Role
from memplan.planning.schedule import Kind, Schedule, runs

_COPY_NBYTES = 4  # of a number that every copy makes beside what it copies, `u32[]`


@dataclass(frozen=True)
class Packing:
    """What a schedule takes.

    Attributes:
      nbytes: of temporaries on the device, as XLA lays them out.
      live_nbytes: of those that are there at once, at the most.
      reused_nbytes: of buffers that lie in donated arguments or outputs.
      host_nbytes: of offloaded values, as XLA lays them out.
    """

    nbytes: int
    live_nbytes: int
    reused_nbytes: int
    host_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer has its place during the actions `[first, end)`; what is written over another takes it over."""

    buffer: int
    first: int
    end: int
    nbytes: int


@dataclass
class _Version:
    """A buffer as one run or one copy writes it; times are positions of actions, both included.

    Attributes:
      read: somebody reads it, or it is an output.
      made: of a fusion's results that nobody reads it is not.
      alone: its run makes nothing else, but would have.
    """

    buffer: int
    start: int
    end: int
    nbytes: int
    read: bool = False
    made: bool = True
    alone: bool = False


def pack(problem: Problem, schedule: Schedule | None = None) -> Packing:
    """Lay out a schedule; by default each kernel runs once, in the module's order."""
    return _Layout(problem, _plain(problem) if schedule is None else schedule).packing()


def live_nbytes(problem: Problem, schedule: Schedule | None = None) -> np.ndarray:
    """Bytes of temporaries that are there at each action, arguments and outputs put to use; as many as actions."""
    return _Layout(problem, _plain(problem) if schedule is None else schedule).live_nbytes()


def lifetimes(problem: Problem) -> tuple[Sequence[Lifetime], Sequence[Lifetime]]:
    """Temporaries of the module's own order: on the device, those of `live_nbytes`; and on the host."""
    layout = _Layout(problem, _plain(problem))
    return layout.lifetimes(), layout.on_host()


def _plain(problem: Problem) -> Schedule:
    return runs(range(len(problem.kernels)))


def needed(problem: Problem, schedule: Schedule) -> Schedule:
    """The actions whose results somebody reads, or that act. XLA:GPU deletes other runs, XLA:CPU runs them."""
    device, host = set(problem.returned), set[int]()
    coming, leaving = set[int](), set[int]()  # copies that end later and are kept
    kept = []
    for action in reversed(schedule):
        number, kind = action.number, action.kind
        if kind is Kind.RUN:
            kernel = problem.kernels[number]
            wanted = not kernel.repeatable or not device.isdisjoint(kernel.writes)
            if wanted:
                device.difference_update(kernel.writes)
                device.update(kernel.reads)
        elif kind is Kind.PREFETCHED:
            wanted = number in device
            _move(number, device, coming, wanted)
        elif kind is Kind.PREFETCH:
            wanted = number in coming
            _move(number, coming, host, wanted)
        elif kind is Kind.OFFLOADED:
            wanted = number in host
            _move(number, host, leaving, wanted)
        else:
            wanted = number in leaving
            _move(number, leaving, device, wanted)
        if wanted:
            kept.append(action)
    return tuple(kept[::-1])


def _move(number: int, source: set[int], target: set[int], wanted: bool) -> None:
    if wanted:
        source.discard(number)
        target.add(number)


class _Layout:
    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self._problem, self._schedule = problem, schedule
        self._versions: list[_Version] = []
        self._served: list[list[int]] = []  # of every action: the versions that it reads
        self._written: list[list[int]] = []
        self._on_host: list[_Version] = []
        self._sent: list[int] = []  # of what is on the host: the version that the copy there made beside it
        self._back: dict[int, int] = {}  # a version that comes back -> what it is of on the host
        self._run_through()
        self._position = self._post_order()
        self._groups: dict[int, list[int]] = defaultdict(list)  # versions that are one by necessity
        for number, version in enumerate(self._versions):
            place = problem.buffers[version.buffer].place
            repeated = problem.buffers[version.buffer].maker is not None and place == version.buffer
            self._groups[len(problem.buffers) + number if repeated else place].append(number)
        self._join_alone()
        for group in self._groups.values():
            self._part_in_time(group)

    def _run_through(self) -> None:
        problem, current = self._problem, dict[int, int]()
        for number, buffer in enumerate(problem.buffers):
            if buffer.maker is None:
                current[number] = len(self._versions)
                self._versions.append(_Version(number, -1, -1, buffer.nbytes))
        leaving, coming, there, away = dict[int, int](), dict[int, list[int]](), dict[int, int](), dict[int, _Version]()
        for time, action in enumerate(self._schedule):
            reads, writes = list[int](), list[int]()
            number = action.number
            if action.kind is Kind.RUN:
                kernel = problem.kernels[number]
                reads = [current[read] for read in kernel.reads]
                writes = [self._begun(written, time) for written in kernel.writes]
                current.update(zip(kernel.writes, writes, strict=True))
            elif action.kind is Kind.OFFLOAD:
                reads = [leaving.setdefault(number, current[number])]
                away[number] = _Version(number, time, time, problem.buffers[number].nbytes)
                self._on_host.append(away[number])
                there[number] = len(self._sent)
                writes = [self._begun(number, time, _COPY_NBYTES)]
                self._sent += writes
            elif action.kind is Kind.OFFLOADED:
                reads = [leaving.pop(number), self._sent[there[number]]]
            elif action.kind is Kind.PREFETCH:
                writes = [self._begun(number, time), self._begun(number, time, _COPY_NBYTES)]
                coming[number] = writes
                self._back[writes[0]] = there[number]
            else:
                reads = coming.pop(number)
                current[number] = reads[0]
            if action.kind is not Kind.RUN:
                away[number].end = time
            for version in reads:
                self._versions[version].end, self._versions[version].read = time, True
            self._served.append(reads)
            self._written.append(writes)
        self._current = current
        for number in problem.outputs:
            version = self._versions[current[number]]
            version.end, version.read = len(self._schedule), True
        for time, written in enumerate(self._written):
            kernel = self._kernel(time)
            if kernel is not None and kernel.sheds and len(written) > 1:
                self._shed([self._versions[version] for version in written])

    def _begun(self, buffer: int, time: int, nbytes: int | None = None) -> int:
        self._versions.append(
            _Version(buffer, time, time, self._problem.buffers[buffer].nbytes if nbytes is None else nbytes)
        )
        return len(self._versions) - 1

    def _kernel(self, time: int) -> Kernel | None:
        """What runs at this time; None where a copy begins or ends."""
        action = self._schedule[time]
        return self._problem.kernels[action.number] if action.kind is Kind.RUN else None

    def _shed(self, results: Sequence[_Version]) -> None:
        """XLA takes out of a fusion what nobody reads."""
        read = [version for version in results if version.read]
        for version in results:
            version.made = version.read or not read
            version.alone = len(read) == 1

    def _join_alone(self) -> None:
        """A buffer that others are one with, and its first version, make one group."""
        shared = {buffer.place for n, buffer in enumerate(self._problem.buffers) if buffer.place != n}
        for key in [key for key in self._groups if key >= len(self._problem.buffers)]:
            place = self._versions[key - len(self._problem.buffers)].buffer
            if place in shared:
                self._groups[place] = sorted(self._groups[place] + self._groups.pop(key))

    def _part_in_time(self, group: list[int]) -> None:
        """In one place, one version ends when the next begins (`HloLiveRange::NormalizeAliasedBuffers`)."""
        versions = sorted((self._versions[number] for number in group), key=lambda one: (one.start, one.end))
        for one, other in itertools.pairwise(versions):
            other.end = max(one.end, other.end)
            one.end = min(one.end, other.start)

    def packing(self) -> Packing:
        reused, left = self._reused()
        groups = self._shared(left)
        tables, nbytes = self._tables_nbytes(), self._smaller_heap(groups, self._position)
        host = self._smaller_heap(self._host_groups(), [self._position[version] for version in self._sent])
        return Packing(nbytes + tables, groups.live_nbytes() + tables, reused, host)

    def _smaller_heap(self, groups: _Groups, position: Sequence[int]) -> int:
        by_size = self._heap(groups, lambda g: (-groups.nbytes[g], groups.own_span(g), position[g], g))
        return self._heap(groups, lambda g: (-groups.span(g), -groups.nbytes[g], position[g], g), by_size)

    def _host_groups(self) -> _Groups:
        """On the host: each memory space has a heap of its own (`AssignBuffersWithSequentialOrdering`)."""
        versions = dict(enumerate(self._on_host))
        begun = {number: one.start for number, one in versions.items()}
        ended = {number: one.end for number, one in versions.items()}
        nbytes = {number: one.nbytes for number, one in versions.items()}
        return _Groups.made({number: number for number in versions}, begun, ended, nbytes)

    def _tables_nbytes(self) -> int:
        """Those of the module, of what runs again and has several results, and of copies; each aligned by itself."""
        ran, found = set[int](), self._problem.tables_nbytes
        for time, action in enumerate(self._schedule):
            if action.kind in (Kind.OFFLOAD, Kind.PREFETCH):
                found += self._problem.alignment
            elif action.kind is Kind.RUN:
                results = [self._versions[number].made for number in self._written[time]].count(True)
                found += self._problem.alignment * (action.number in ran and results > 1)
                ran.add(action.number)
        return found

    def live_nbytes(self) -> np.ndarray:
        change = np.zeros(len(self._schedule) + 2, np.int64)
        for one in self.lifetimes():
            change[one.first] += one.nbytes
            change[one.end] -= one.nbytes
        return np.cumsum(change)[: len(self._schedule)]

    def lifetimes(self) -> list[Lifetime]:
        _, left = self._reused()
        groups = self._shared(left)
        found = []
        for group, numbers in groups.members.items():
            until = -1
            for version in sorted((self._versions[number] for number in numbers), key=lambda one: one.start):
                first, until = max(version.start, until), max(version.end + 1, until)
                found.append(Lifetime(version.buffer, first, until, groups.nbytes[group]))
        return found

    def on_host(self) -> list[Lifetime]:
        buffers = self._problem.buffers
        there = (version for version in self._versions if buffers[version.buffer].role is Role.ON_HOST)
        return [Lifetime(one.buffer, one.start, one.end + 1, buffers[one.buffer].nbytes) for one in there]

    def _nbytes(self, group: Iterable[int]) -> int:
        versions = (self._versions[number] for number in group)
        return max(version.made * version.nbytes for version in versions)

    def _reused(self) -> tuple[int, list[list[int]]]:
        """Bytes that found a place in arguments and outputs; the groups of versions that did not."""
        problem = self._problem
        roles = {
            key: {problem.buffers[self._versions[n].buffer].role for n in group} for key, group in self._groups.items()
        }
        lives_out = {
            key: any(self._versions[n].buffer in problem.returned for n in group) for key, group in self._groups.items()
        }
        made = {key: min(self._position[n] for n in group) for key, group in self._groups.items()}
        places = _Places(self._versions, self._interfere)
        left, reused = [], 0
        order = sorted(self._groups, key=lambda k: (-self._nbytes(self._groups[k]), not lives_out[k], made[k], k))
        for key in order:
            group = self._groups[key]
            nbytes = self._nbytes(group)
            if Role.ARGUMENT in roles[key]:
                if any(self._versions[n].buffer in problem.donated for n in group):
                    places.open(nbytes, group)
                continue
            if Role.CONSTANT in roles[key] or Role.ON_HOST in roles[key] or not nbytes:
                continue
            if places.take(group, nbytes if lives_out[key] else None):
                reused += nbytes
            elif lives_out[key]:
                places.open(nbytes, group)
            else:
                left.append(sorted(group))
        return reused, left

    def _post_order(self) -> Sequence[int]:
        """Of every version its place in XLA's walk from results to operands (`MakeInstructionPostOrder`)."""
        results = [self._current[number] for number in self._problem.outputs]
        read = {number for served in self._served for number in served}.union(results)
        unread = [written[0] for written in self._written if written and read.isdisjoint(written)]
        position, count = [-1] * len(self._versions), 0
        waiting = [(number, False) for number in reversed(unread + results)]
        while waiting:
            number, seen = waiting.pop()
            time = self._versions[number].start
            if position[number] >= 0:
                continue
            if seen or time < 0:
                for one in self._written[time] if seen else [number]:
                    position[one] = count
                count += 1
            else:
                waiting.append((number, True))
                sources = [self._sent[self._back[number]]] if number in self._back else self._served[time]
                waiting += ((source, False) for source in reversed(sources))
        return position

    def _interfere(self, one: int, other: int) -> bool:
        first, second = self._versions[one], self._versions[other]
        if first.end < second.start or second.end < first.start:
            return False
        if first.end == second.start:
            return not self._may_cover(other, one, elements=True)
        if second.end == first.start:
            return not self._may_cover(one, other, elements=True)
        return True

    def _may_cover(self, new: int, old: int, elements: bool = False) -> bool:
        """May a version be written over one that ends there?

        Args:
          elements: also over an element of a tuple: what comes back, or one result of several.
        """
        time = self._versions[new].start
        if time < 0 or new not in self._written[time] or old not in self._served[time]:
            return False
        kernel, source = self._kernel(time), self._versions[old]
        if kernel is None:
            return False
        came_back = source.start >= 0 and self._kernel(source.start) is None
        written, sources = self._versions[new].buffer, ()
        if elements or not came_back:
            sources += tuple(kernel.over.get(written, ()))
        if elements or source.alone:
            sources += tuple(kernel.over_elements.get(written, ()))
        return source.buffer in sources

    def _shared(self, left: list[list[int]]) -> _Groups:
        """Events in time: kernels write over what ends there."""
        group_of = {number: at for at, group in enumerate(left) for number in group}
        several = {number for group in left if len(group) > 1 for number in group}
        starts: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        for number in sorted(group_of, key=lambda n: (self._versions[n].start, self._versions[n].end, n)):
            starts[self._versions[number].start].append(number)
            ends[self._versions[number].end].append(number)
        clock, begun, ended, home = 0, {}, {}, {}
        for time in range(-1, len(self._schedule) + 1):
            for number in starts[time]:
                home[number] = group_of[number]
                if number not in several:
                    covered = self._covered(number, ends[time], several)
                    if covered is not None:
                        ends[time].remove(covered)
                        ended[covered] = clock
                        clock += 1
                        home[number] = home[covered]
                begun[number] = clock
                clock += 1
            for number in ends[time]:
                ended[number] = clock
                clock += 1
        nbytes = {n: self._nbytes([n]) for n in group_of}
        return _Groups.made(home, begun, ended, nbytes)

    def _covered(self, number: int, ending: Sequence[int], several: set[int]) -> int | None:
        time = self._versions[number].start
        if time < 0:
            return None
        nbytes = self._versions[number].nbytes
        for old in self._served[time]:
            same_size = self._versions[old].nbytes == nbytes
            if old in ending and old not in several and same_size and self._may_cover(number, old):
                return old
        return None

    def _heap(self, groups: _Groups, key: Callable[[int], tuple[int, ...]], most: float = math.inf) -> int:
        """Bytes of the heap, its groups placed in the order of the key; or `most`, if that is less."""
        count = sum(map(len, groups.members.values()))
        begun, ended = (np.zeros(count, np.int32) for _ in range(2))
        low, high = (np.zeros(count, np.int64) for _ in range(2))
        placed = top = 0
        for group in sorted(groups.members, key=key):
            nbytes = groups.nbytes[group]
            beside = np.zeros(placed, bool)
            for number in groups.members[group]:
                beside |= (begun[:placed] <= groups.ended[number]) & (ended[:placed] >= groups.begun[number])
            at = _smallest_gap(low[:placed][beside], high[:placed][beside], nbytes, self._problem.alignment)
            for number in groups.members[group]:
                begun[placed], ended[placed] = groups.begun[number], groups.ended[number]
                low[placed], high[placed] = at, at + nbytes
                placed += 1
            top = max(top, at + nbytes)
            if top >= most:
                return int(most)
        return top


class _Places:
    """Arguments and outputs, and the versions that lie in each, from the largest place to the smallest."""

    def __init__(self, versions: Sequence[_Version], interfere: Callable[[int, int], bool]) -> None:
        self._versions, self._interfere = versions, interfere
        self._sizes: list[int] = []
        self._inside: list[list[int]] = []
        self._count = 0  # of versions that lie somewhere
        self._start, self._end, self._at = (np.zeros(len(versions), np.int64) for _ in range(3))

    def open(self, nbytes: int, group: Sequence[int]) -> None:
        """A new place, with what it is of."""
        self._sizes.append(nbytes)
        self._inside.append([])
        self._put(len(self._sizes) - 1, group)

    def take(self, group: Sequence[int], nbytes: int | None) -> bool:
        """Put versions into the smallest place that is free for them; of just so many bytes, where they are given."""
        blocked, touched = np.zeros(len(self._sizes), bool), np.zeros(len(self._sizes), bool)
        start, end, at = self._start[: self._count], self._end[: self._count], self._at[: self._count]
        for number in group:
            version = self._versions[number]
            touched[at[(start <= version.end) & (end >= version.start)]] = True
            blocked[at[(start < version.end) & (end > version.start)]] = True
        for place in np.flatnonzero(~blocked)[::-1].tolist():
            fits = nbytes is None or self._sizes[place] == nbytes
            if fits and not (touched[place] and self._interferes(place, group)):
                self._put(place, group)
                return True
        return False

    def _interferes(self, place: int, group: Sequence[int]) -> bool:
        return any(self._interfere(one, other) for one in self._inside[place] for other in group)

    def _put(self, place: int, group: Sequence[int]) -> None:
        self._inside[place] += group
        for number in group:
            version = self._versions[number]
            self._start[self._count], self._end[self._count] = version.start, version.end
            self._at[self._count] = place
            self._count += 1


def _smallest_gap(low: np.ndarray, high: np.ndarray, nbytes: int, alignment: int) -> int:
    """Where so many bytes go: into the smallest gap that holds them, the lowest of several, else on top."""
    if not len(low):
        return 0
    order = np.argsort(low)
    free = np.concatenate([[0], np.maximum.accumulate(-(-high[order] // alignment) * alignment)])
    gaps = low[order] - free[:-1]
    fitting = np.flatnonzero(gaps >= nbytes)
    return int(free[fitting[np.argmin(gaps[fitting])]] if len(fitting) else free[-1])


@dataclass(frozen=True)
class _Groups:
    """Versions that lie in one place of the heap.

    Attributes:
      members: of each group, by its first version.
      begun, ended: of versions, in events.
      nbytes: of groups.
    """

    members: dict[int, list[int]]
    begun: dict[int, int]
    ended: dict[int, int]
    nbytes: dict[int, int]

    @staticmethod
    def made(home: dict[int, int], begun: dict[int, int], ended: dict[int, int], nbytes: dict[int, int]) -> _Groups:
        together: dict[int, list[int]] = defaultdict(list)
        for number in sorted(home, key=begun.__getitem__):
            together[home[number]].append(number)
        members = {numbers[0]: numbers for numbers in together.values()}
        sizes = {first: max(nbytes[n] for n in numbers) for first, numbers in members.items()}
        return _Groups(members, begun, ended, sizes)

    def span(self, group: int) -> int:
        numbers = self.members[group]
        return max(self.ended[n] for n in numbers) - min(self.begun[n] for n in numbers)

    def own_span(self, group: int) -> int:
        """Minus the duration that ties of size go by: of the first version alone."""
        return self.begun[group] - self.ended[group]

    def live_nbytes(self) -> int:
        change = np.zeros(2 * len(self.begun) + 2, np.int64)
        for group, numbers in self.members.items():
            until = 0
            for number in numbers:  # where one ends when the next has begun, the place is there once
                first, until = max(self.begun[number], until), max(self.ended[number], until)
                change[first] += self.nbytes[group]
                change[until] -= self.nbytes[group]
        return int(np.cumsum(change).max())
