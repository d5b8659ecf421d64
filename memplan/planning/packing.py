"""Predicts where XLA puts the buffers of a schedule, and their bytes.

Follows XLA's `BufferAssigner` and `HeapSimulator`, in three steps:

1. Every donated argument is an allocation. From the largest buffer down, an output takes a free
   allocation of its own size, or else becomes one; any other buffer takes the smallest allocation
   that holds it and is free during its live range.
2. The remaining buffers are visited in time: a kernel overwrites an operand at its last read, if it
   may.
3. XLA:TPU keeps some of the others in its cores (`vector_memory`). The rest share one heap. They
   are placed by size or by live range, the largest first, each in the smallest gap that holds it
   (`GlobalDecreasingSizeBestFitHeap`, the better of its two orders: `ChooseBestHeapAlgorithm`).
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
from memplan.planning.vector_memory import VectorMemory


@dataclass(frozen=True)
class Packing:
    """Bytes of a schedule."""

    nbytes: int  # of temporaries on the device, as XLA lays them out
    live_nbytes: int  # peak of the live temporaries
    reused_nbytes: int  # of buffers in donated arguments or outputs
    host_nbytes: int = 0  # of offloaded values, as XLA lays them out


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The actions `[first, end)` during which a buffer has memory.

    If another buffer overwrites it, that one's lifetime follows.
    """

    buffer: int
    first: int
    end: int
    nbytes: int


def pack(problem: Problem, schedule: Schedule | None = None) -> Packing:
    """Lay out a schedule; by default each kernel runs once, in the module's order."""
    return _Layout(problem, schedule).packing()


def live_nbytes(problem: Problem, schedule: Schedule | None = None) -> np.ndarray:
    """Bytes of live temporaries at each action, shape (actions,).

    Temporaries in arguments and outputs do not count.
    """
    layout = _Layout(problem, schedule)
    change = np.zeros(len(layout.schedule) + 2, np.int64)
    for lifetime in layout.lifetimes():
        change[lifetime.first] += lifetime.nbytes
        change[lifetime.end] -= lifetime.nbytes
    return np.cumsum(change)[: len(layout.schedule)]


def lifetimes(problem: Problem) -> tuple[Sequence[Lifetime], Sequence[Lifetime]]:
    """Lifetimes of temporaries in the module's own order.

    Returns:
      Those on the device, which `live_nbytes` counts; those on the host.
    """
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
        reused_nbytes, remaining = self._reuse_allocations()
        groups = self._reuse_operands(remaining)
        tables_nbytes = self._tables_nbytes()
        alignment = self._problem.alignment
        nbytes = heap_nbytes(groups, self._position, alignment)
        if tables_nbytes:  # behind the buffers, the first one aligned
            nbytes = -(-nbytes // alignment) * alignment
        # each memory space has a heap of its own (`AssignBuffersWithSequentialOrdering`)
        versions = dict(enumerate(self._live.on_host))
        on_host = HeapGroups.of(
            {number: number for number in versions},
            {number: version.start for number, version in versions.items()},
            {number: version.end for number, version in versions.items()},
            {number: version.nbytes for number, version in versions.items()},
        )
        positions = [self._position[token] for token in self._live.offload_tokens]
        return Packing(
            nbytes + tables_nbytes,
            groups.live_nbytes() + tables_nbytes,
            reused_nbytes,
            heap_nbytes(on_host, positions, alignment),
        )

    def _tables_nbytes(self) -> int:
        """Bytes of tables.

        They are the module's, and an aligned one per copy and per repeated kernel with several
        results.
        """
        ran = set[int]()
        nbytes = self._problem.tables_nbytes
        for time, action in enumerate(self.schedule):
            if action.kind in (Kind.OFFLOAD, Kind.PREFETCH):
                nbytes += self._problem.alignment
            elif action.kind is Kind.RUN:
                if action.number in ran and len(self._live.writes[time]) > 1:
                    nbytes += self._problem.alignment
                ran.add(action.number)
        return nbytes

    def lifetimes(self) -> list[Lifetime]:
        _, remaining = self._reuse_allocations()
        groups = self._reuse_operands(remaining)
        spans = []
        for group, numbers in groups.members.items():
            until = -1
            versions = (self._versions[number] for number in numbers)
            for version in sorted(versions, key=lambda version: version.start):
                first = max(version.start, until)
                until = max(version.end + 1, until)
                spans.append(Lifetime(version.buffer, first, until, groups.nbytes[group]))
        return spans

    def on_host(self) -> list[Lifetime]:
        spans = []
        for version in self._versions:
            buffer = self._problem.buffers[version.buffer]
            if buffer.role is Role.ON_HOST:
                end = version.end + 1
                spans.append(Lifetime(version.buffer, version.start, end, buffer.nbytes))
        return spans

    def _nbytes(self, group: Iterable[int]) -> int:
        return max(self._versions[number].nbytes for number in group)

    def _reuse_allocations(self) -> tuple[int, list[list[int]]]:
        """Put versions into arguments and outputs, and into a memory in the cores.

        Returns:
          The bytes in arguments and outputs, and the groups of versions that remain.
        """
        problem = self._problem
        groups = self._live.groups
        # by group: its buffers, their roles, and whether one is a result of the step
        members: dict[int, set[int]] = {}
        roles: dict[int, set[Role]] = {}
        returned: dict[int, bool] = {}
        for key, group in groups.items():
            members[key] = {self._versions[number].buffer for number in group}
            roles[key] = {problem.buffers[buffer].role for buffer in members[key]}
            returned[key] = not members[key].isdisjoint(problem.returned)
        allocations = _CallerAllocations(self._versions, self._live.interfere)
        remaining = []
        reused_nbytes = 0

        def order(key: int) -> tuple[int, ...]:
            nbytes = self._nbytes(groups[key])
            return -nbytes, not returned[key], self._entry_position(groups[key]), key

        for key in sorted(groups, key=order):
            group = groups[key]
            nbytes = self._nbytes(group)
            if Role.ARGUMENT in roles[key]:
                if not members[key].isdisjoint(problem.donated):
                    allocations.open(nbytes, group)
                continue
            if Role.CONSTANT in roles[key] or Role.ON_HOST in roles[key] or not nbytes:
                continue
            if allocations.take(group, nbytes if returned[key] else None):
                reused_nbytes += nbytes
            elif returned[key]:
                allocations.open(nbytes, group)
            else:
                remaining.append(sorted(group))
        if problem.vector_memory_bytes:
            kept = VectorMemory(problem, self._live).kept(remaining)
            remaining = [group for group in remaining if group[0] not in kept]
        return reused_nbytes, remaining

    def _entry_position(self, group: Iterable[int]) -> int:
        """The first position of a group's versions.

        XLA numbers instructions of the entry first; those of other computations have no position.
        """
        positions = (self._position[number] for number in group)
        in_entry = (position for position in positions if position >= 0)
        return min(in_entry, default=len(self._versions))

    def _reuse_operands(self, remaining: list[list[int]]) -> HeapGroups:
        """Visit versions in time, counted in events: kernels overwrite operands that end there."""
        versions = self._versions
        group_of = {number: group for group, numbers in enumerate(remaining) for number in numbers}
        several = {number for group in remaining if len(group) > 1 for number in group}
        starts: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        for number in sorted(group_of, key=lambda n: (versions[n].start, versions[n].end, n)):
            starts[versions[number].start].append(number)
            ends[versions[number].end].append(number)
        event = 0
        start: dict[int, int] = {}
        end: dict[int, int] = {}
        shared: dict[int, int] = {}  # version -> the group whose memory it shares
        for time in range(-1, len(self.schedule) + 1):
            for number in starts[time]:
                shared[number] = group_of[number]
                if number not in several:
                    old = self._overwritten(number, ends[time], several)
                    if old is not None:
                        ends[time].remove(old)
                        end[old] = event
                        event += 1
                        shared[number] = shared[old]
                start[number] = event
                event += 1
            for number in ends[time]:
                end[number] = event
                event += 1
        nbytes = {number: self._nbytes([number]) for number in group_of}
        return HeapGroups.of(shared, start, end, nbytes)

    def _overwritten(self, number: int, ending: Sequence[int], several: set[int]) -> int | None:
        """The first operand that ends here and that the version may overwrite."""
        version = self._versions[number]
        if version.start < 0:
            return None
        for old in self._live.reads[version.start]:
            is_candidate = old in ending and old not in several
            is_same_size = self._versions[old].nbytes == version.nbytes
            if is_candidate and is_same_size and self._live.may_overwrite(number, old):
                return old
        return None


def _post_order(live: Liveness) -> Sequence[int]:
    """Position of every version in XLA's walk from results to operands.

    See `MakeInstructionPostOrder`.
    """
    read = {number for reads in live.reads for number in reads}.union(live.outputs)
    unread = [writes[0] for writes in live.writes if writes and read.isdisjoint(writes)]
    position = [-1] * len(live.versions)
    count = 0
    stack = [(number, False) for number in reversed(unread + live.outputs)]
    while stack:
        number, is_expanded = stack.pop()
        time = live.versions[number].start
        if position[number] >= 0:
            continue
        if is_expanded or time < 0:
            for version in live.writes[time] if is_expanded else [number]:
                position[version] = count
            count += 1
        else:
            stack.append((number, True))
            sources = live.reads[time]
            if number in live.prefetched_from:
                sources = [live.offload_tokens[live.prefetched_from[number]]]
            stack += ((source, False) for source in reversed(sources))
    return position


class _CallerAllocations:
    """Donated arguments and outputs, the largest first, and the versions in each."""

    def __init__(self, versions: Sequence[Version], interfere: Callable[[int, int], bool]) -> None:
        self._versions = versions
        self._interfere = interfere
        self._sizes: list[int] = []
        self._members: list[list[int]] = []
        # by version in an allocation: its live range and its allocation
        self._count = 0
        self._start = np.zeros(len(versions), np.int64)
        self._end = np.zeros(len(versions), np.int64)
        self._allocation = np.zeros(len(versions), np.int64)

    def open(self, nbytes: int, group: Sequence[int]) -> None:
        """Add an allocation with these versions."""
        self._sizes.append(nbytes)
        self._members.append([])
        self._put(len(self._sizes) - 1, group)

    def take(self, group: Sequence[int], nbytes: int | None) -> bool:
        """Put versions into the smallest allocation that is free for them.

        Args:
          nbytes: size of the allocation; None: any.
        """
        start = self._start[: self._count]
        end = self._end[: self._count]
        allocations = self._allocation[: self._count]
        blocked = np.zeros(len(self._sizes), bool)
        touched = np.zeros(len(self._sizes), bool)
        for number in group:
            version = self._versions[number]
            touched[allocations[(start <= version.end) & (end >= version.start)]] = True
            blocked[allocations[(start < version.end) & (end > version.start)]] = True
        for allocation in np.flatnonzero(~blocked)[::-1].tolist():
            fits = nbytes is None or self._sizes[allocation] == nbytes
            if fits and not (touched[allocation] and self._interferes(allocation, group)):
                self._put(allocation, group)
                return True
        return False

    def _interferes(self, allocation: int, group: Sequence[int]) -> bool:
        """Does any version in an allocation interfere with one of the group?"""
        pairs = ((member, number) for member in self._members[allocation] for number in group)
        return any(self._interfere(*pair) for pair in pairs)

    def _put(self, allocation: int, group: Sequence[int]) -> None:
        self._members[allocation] += group
        for number in group:
            version = self._versions[number]
            self._start[self._count] = version.start
            self._end[self._count] = version.end
            self._allocation[self._count] = allocation
            self._count += 1


@dataclass(frozen=True)
class HeapGroups:
    """Versions that share memory of the heap, XLA's colocations."""

    members: dict[int, list[int]]  # of each group, by its first version
    # start, end: of versions, in events
    start: dict[int, int]
    end: dict[int, int]
    nbytes: dict[int, int]  # of groups

    @staticmethod
    def of(
        group_of: Mapping[int, int],
        start: dict[int, int],
        end: dict[int, int],
        nbytes: Mapping[int, int],
    ) -> HeapGroups:
        """Group versions, ordered by start."""
        grouped: dict[int, list[int]] = defaultdict(list)
        for number in sorted(group_of, key=start.__getitem__):
            grouped[group_of[number]].append(number)
        members = {numbers[0]: numbers for numbers in grouped.values()}
        sizes = {group: max(map(nbytes.__getitem__, numbers)) for group, numbers in members.items()}
        return HeapGroups(members, start, end, sizes)

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
                first = max(self.start[number], until)
                until = max(self.end[number], until)
                change[first] += self.nbytes[group]
                change[until] -= self.nbytes[group]
        return int(np.cumsum(change).max())


def heap_nbytes(groups: HeapGroups, position: Sequence[int], alignment: int) -> int:
    """Bytes of the smaller of XLA's two heaps; ties are placed by position."""

    def by_size(group: int) -> tuple[int, ...]:
        return -groups.nbytes[group], groups.own_span(group), position[group], group

    def by_span(group: int) -> tuple[int, ...]:
        return -groups.span(group), -groups.nbytes[group], position[group], group

    return _best_fit(groups, by_span, alignment, _best_fit(groups, by_size, alignment))


def _best_fit(
    groups: HeapGroups,
    key: Callable[[int], tuple[int, ...]],
    alignment: int,
    bound: float = math.inf,
) -> int:
    """Bytes of the heap if groups are placed in the order of the key; `bound` if that is less."""
    count = sum(map(len, groups.members.values()))
    # by placed version: its live range and its offsets
    start = np.zeros(count, np.int32)
    end = np.zeros(count, np.int32)
    low = np.zeros(count, np.int64)
    high = np.zeros(count, np.int64)
    placed = top = 0
    for group in sorted(groups.members, key=key):
        nbytes = groups.nbytes[group]
        overlaps = np.zeros(placed, bool)
        for number in groups.members[group]:
            begins_before = start[:placed] <= groups.end[number]
            overlaps |= begins_before & (end[:placed] >= groups.start[number])
        offset = _smallest_gap(low[:placed][overlaps], high[:placed][overlaps], nbytes, alignment)
        for number in groups.members[group]:
            start[placed] = groups.start[number]
            end[placed] = groups.end[number]
            low[placed] = offset
            high[placed] = offset + nbytes
            placed += 1
        top = max(top, offset + nbytes)
        if top >= bound:
            return int(bound)
    return top


def _smallest_gap(low: np.ndarray, high: np.ndarray, nbytes: int, alignment: int) -> int:
    """The offset of the smallest gap that holds `nbytes`, the lowest of equal ones.

    Without one, the heap's top.
    """
    if not len(low):
        return 0
    order = np.argsort(low)
    free = np.concatenate([[0], np.maximum.accumulate(-(-high[order] // alignment) * alignment)])
    gaps = low[order] - free[:-1]
    fitting = np.flatnonzero(gaps >= nbytes)
    return int(free[fitting[np.argmin(gaps[fitting])]] if len(fitting) else free[-1])
