"""Live ranges: the versions of every buffer in a schedule, the actions that read each, and which may share a place.

As in XLA, a *version* is the value that one run or copy writes (`HloValue`), its live range goes from the action that
writes it to its last reader (`HloLiveRange`), and versions that are updated in place or carried by a loop form a group
(`HloBuffer`). `CanShareOperandBufferWithUser` says whether a version may overwrite one that ends there. A prefetch
writes a version of its own that no kernel overwrites, since it is an element of a tuple.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memplan.planning.problem import Kernel, Problem
from memplan.planning.schedule import Kind, Schedule

_COPY_NBYTES = 4  # the `u32[]` that every copy also returns


@dataclass
class Version:
    """The value of a buffer that one run or copy writes.

    Times are positions of actions, both included as in `HloLiveRange`: one version may end where the next begins.
    """

    buffer: int
    start: int
    end: int
    nbytes: int


def eliminate_dead(problem: Problem, schedule: Schedule) -> Schedule:
    """The actions that have an effect or a result that is read. XLA:GPU deletes other runs, XLA:CPU executes them."""
    device, host = set(problem.returned), set[int]()
    prefetching, offloading = set[int](), set[int]()  # copies whose end is kept, so their start is, too
    demand = {  # kind -> (set of which it serves a member, set that it needs the member in)
        Kind.PREFETCHED: (device, prefetching),
        Kind.PREFETCH: (prefetching, host),
        Kind.OFFLOADED: (host, offloading),
        Kind.OFFLOAD: (offloading, device),
    }
    kept = []
    for action in reversed(schedule):
        if action.kind is Kind.RUN:
            kernel = problem.kernels[action.number]
            if kernel.recomputable and device.isdisjoint(kernel.writes):
                continue
            device.difference_update(kernel.writes)
            device.update(kernel.reads)
        else:
            served, wanted = demand[action.kind]
            if action.number not in served:
                continue
            served.discard(action.number)
            wanted.add(action.number)
        kept.append(action)
    return tuple(kept[::-1])


class Liveness:
    """Versions of one schedule, by number."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self._problem, self._schedule = problem, schedule
        self.versions: list[Version] = []  # on the device
        # by action: the versions that it reads, and those that it writes
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.on_host: list[Version] = []
        self.beside: list[int] = []  # by version on the host: the `u32[]` version of its offload
        self.fetched: dict[int, int] = {}  # prefetched version -> the version on the host that it copies
        self._replay()
        # versions that must share a place: those of arguments and of shared places, by place; others are alone
        self.groups: dict[int, list[int]] = defaultdict(list)
        buffers = problem.buffers
        shared = {buffer.place for number, buffer in enumerate(buffers) if buffer.place != number}
        for number, version in enumerate(self.versions):
            place = buffers[version.buffer].place
            own = buffers[version.buffer].maker is not None and place == version.buffer and place not in shared
            self.groups[len(buffers) + number if own else place].append(number)
        for group in self.groups.values():
            # in one place, one version ends when the next begins (`HloLiveRange::NormalizeAliasedBuffers`)
            versions = sorted((self.versions[number] for number in group), key=lambda one: (one.start, one.end))
            for one, other in itertools.pairwise(versions):
                other.end = max(one.end, other.end)
                one.end = min(one.end, other.start)

    def kernel(self, time: int) -> Kernel | None:
        """The kernel that runs at this time; None for a copy."""
        action = self._schedule[time]
        return self._problem.kernels[action.number] if action.kind is Kind.RUN else None

    def interfere(self, one: int, other: int) -> bool:
        """Do two versions need different places?"""
        first, second = self.versions[one], self.versions[other]
        if first.end < second.start or second.end < first.start:
            return False
        if first.end == second.start:
            return not self.may_write_over(other, one, elements=True)
        if second.end == first.start:
            return not self.may_write_over(one, other, elements=True)
        return True

    def may_write_over(self, new: int, old: int, elements: bool = False) -> bool:
        """May a version overwrite one that ends where it starts?

        Args:
          elements: also an element of a tuple: a prefetched version, or one result of several.
        """
        time = self.versions[new].start
        if time < 0 or new not in self.writes[time] or old not in self.reads[time]:
            return False
        kernel, source = self.kernel(time), self.versions[old]
        if kernel is None:
            return False
        fetched = source.start >= 0 and self.kernel(source.start) is None
        written, sources = self.versions[new].buffer, ()
        if elements or not fetched:
            sources += tuple(kernel.may_alias.get(written, ()))
        if elements:
            sources += tuple(kernel.may_alias_elements.get(written, ()))
        return source.buffer in sources

    def _replay(self) -> None:
        problem, current = self._problem, dict[int, int]()
        for number, buffer in enumerate(problem.buffers):
            if buffer.maker is None:
                current[number] = len(self.versions)
                self.versions.append(Version(number, -1, -1, buffer.nbytes))
        leaving, coming, there, away = dict[int, int](), dict[int, list[int]](), dict[int, int](), dict[int, Version]()
        blocks = {kernel.block for kernel in problem.kernels}
        holds = {problem.buffers[number].place: number for number in reversed(current)}  # place -> buffer in it
        for time, action in enumerate(self._schedule):
            reads, writes, ended = list[int](), list[int](), list[int]()
            number = action.number
            if action.kind is Kind.RUN:
                kernel = problem.kernels[number]
                reads = [current[read] for read in kernel.reads]
                ended = [current[one] for one in self._ended(number, holds, number in blocks)]
                holds |= {problem.buffers[written].place: written for written in kernel.writes}
                writes = [self._begin_version(written, time) for written in kernel.writes]
                current.update(zip(kernel.writes, writes, strict=True))
            elif action.kind is Kind.OFFLOAD:
                reads = [leaving.setdefault(number, current[number])]
                away[number] = Version(number, time, time, problem.buffers[number].nbytes)
                self.on_host.append(away[number])
                there[number] = len(self.beside)
                writes = [self._begin_version(number, time, _COPY_NBYTES)]
                self.beside += writes
            elif action.kind is Kind.OFFLOADED:
                reads = [leaving.pop(number), self.beside[there[number]]]
            elif action.kind is Kind.PREFETCH:
                writes = [self._begin_version(number, time), self._begin_version(number, time, _COPY_NBYTES)]
                coming[number] = writes
                self.fetched[writes[0]] = there[number]
            else:
                reads = coming.pop(number)
                current[number] = reads[0]
            if action.kind is not Kind.RUN:
                away[number].end, ended = time, reads
            for version in ended:
                self.versions[version].end = time
            self.reads.append(reads)
            self.writes.append(writes)
        self.outputs = [current[number] for number in problem.outputs]  # versions of the results, in their order
        for number in self.outputs:
            self.versions[number].end = len(self._schedule)

    def _ended(self, number: int, holds: Mapping[int, int], is_loop: bool) -> Iterator[int]:
        """The buffers whose values are live until a kernel runs.

        Not those that a loop's body overwrites: they are until the body begins, which reads nothing.

        Args:
          holds: place -> the buffer in it.
        """
        kernel, buffers = self._problem.kernels[number], self._problem.buffers
        if kernel.reads:
            yield from (read for read in kernel.reads if not is_loop or holds[buffers[read].place] == read)
            return
        for written in kernel.writes:
            taken = holds.get(buffers[written].place, written)
            if taken != written:
                yield taken

    def _begin_version(self, buffer: int, time: int, nbytes: int | None = None) -> int:
        nbytes = self._problem.buffers[buffer].nbytes if nbytes is None else nbytes
        self.versions.append(Version(buffer, time, time, nbytes))
        return len(self.versions) - 1
