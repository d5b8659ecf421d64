"""Live ranges: the versions of every buffer in a schedule, their readers, and which may alias.

As in XLA, a *version* is the value that one run or copy writes (`HloValue`). Its live range goes
from the action that writes it to its last reader (`HloLiveRange`). Versions that are updated in
place or carried by a loop form a group (`HloBuffer`). A version may overwrite one that ends where
it starts, as `CanShareOperandBufferWithUser` allows. A prefetch writes a version of its own that no
kernel overwrites, since it is an element of a tuple.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memplan.planning.problem import Kernel, Problem
from memplan.planning.schedule import Action, Kind, Schedule

_TOKEN_NBYTES = 4  # the `u32[]` that every copy also returns


@dataclass
class Version:
    """The value of a buffer that one run or copy writes.

    Times are positions of actions, both included as in `HloLiveRange`: one version may end where
    the next begins.
    """

    buffer: int
    start: int
    end: int
    nbytes: int


def eliminate_dead(problem: Problem, schedule: Schedule) -> Schedule:
    """The actions that have an effect or a result that is read.

    XLA:GPU deletes other runs, XLA:CPU executes them.
    """
    # buffers that later actions need on the device, and on the host
    device = set(problem.returned)
    host = set[int]()
    # buffers whose copy ends later: the start of the copy is needed
    prefetching = set[int]()
    offloading = set[int]()
    demand = {  # kind -> (the needs that it can serve, the needs that it adds)
        Kind.PREFETCHED: (device, prefetching),
        Kind.PREFETCH: (prefetching, host),
        Kind.OFFLOADED: (host, offloading),
        Kind.OFFLOAD: (offloading, device),
    }
    live = []
    for action in reversed(schedule):
        if action.kind is Kind.RUN:
            kernel = problem.kernels[action.number]
            if kernel.recomputable and device.isdisjoint(kernel.writes):
                continue
            device.difference_update(kernel.writes)
            device.update(kernel.reads)
        else:
            served, needed = demand[action.kind]
            if action.number not in served:
                continue
            served.discard(action.number)
            needed.add(action.number)
        live.append(action)
    return tuple(live[::-1])


@dataclass
class _Copies:
    """Copies during a replay, by buffer."""

    offloading: dict[int, int] = field(default_factory=dict)  # the version that is copied out
    prefetching: dict[int, list[int]] = field(default_factory=dict)  # those that are copied in
    host_numbers: dict[int, int] = field(default_factory=dict)  # its latest version on the host


class Liveness:
    """Versions of one schedule, by number.

    Attributes:
      versions: on the device.
      reads, writes: by action: the versions that it reads, and those that it writes.
      on_host: versions on the host.
      offload_tokens: by version on the host: the `u32[]` version of its offload.
      prefetched_from: prefetched version -> the version on the host that it copies.
      outputs: versions of the results, in their order.
      groups: versions that must alias. Those of arguments and of alias sets with several buffers
        have the number of the alias set as key; every other version is alone.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self._problem = problem
        self._schedule = schedule
        self.versions: list[Version] = []
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.on_host: list[Version] = []
        self.offload_tokens: list[int] = []
        self.prefetched_from: dict[int, int] = {}
        self.outputs: list[int] = []
        self._replay()
        self.groups: dict[int, list[int]] = defaultdict(list)
        buffers = problem.buffers
        alias_sets = [buffer.alias_set for buffer in buffers]
        shared = {alias_set for number, alias_set in enumerate(alias_sets) if alias_set != number}
        for number, version in enumerate(self.versions):
            alias_set = alias_sets[version.buffer]
            is_argument = buffers[version.buffer].maker is None
            is_shared = alias_set != version.buffer or alias_set in shared
            group = alias_set if is_argument or is_shared else len(buffers) + number
            self.groups[group].append(number)
        for numbers in self.groups.values():
            # one version of a group ends when the next begins
            # (`HloLiveRange::NormalizeAliasedBuffers`)
            versions = [self.versions[number] for number in numbers]
            versions.sort(key=lambda version: (version.start, version.end))
            for version, following in itertools.pairwise(versions):
                following.end = max(version.end, following.end)
                version.end = min(version.end, following.start)

    def kernel(self, time: int) -> Kernel | None:
        """The kernel that runs at this time; None for a copy."""
        action = self._schedule[time]
        return self._problem.kernels[action.number] if action.kind is Kind.RUN else None

    def interfere(self, first: int, second: int) -> bool:
        """Do two versions need memory of their own?"""
        version = self.versions[first]
        other_version = self.versions[second]
        if version.end < other_version.start or other_version.end < version.start:
            return False
        if version.end == other_version.start:
            return not self.may_overwrite(second, first, elements=True)
        if other_version.end == version.start:
            return not self.may_overwrite(first, second, elements=True)
        return True

    def may_overwrite(self, new: int, old: int, elements: bool = False) -> bool:
        """May a version overwrite one that ends where it starts?

        Args:
          elements: include elements of tuples: a prefetched version, or one result of several.
        """
        time = self.versions[new].start
        if time < 0 or new not in self.writes[time] or old not in self.reads[time]:
            return False
        kernel = self.kernel(time)
        source = self.versions[old]
        if kernel is None:
            return False
        is_prefetched = source.start >= 0 and self.kernel(source.start) is None
        written = self.versions[new].buffer
        sources = ()
        if elements or not is_prefetched:
            sources += tuple(kernel.may_alias.get(written, ()))
        if elements:
            sources += tuple(kernel.may_alias_elements.get(written, ()))
        return source.buffer in sources

    def _replay(self) -> None:
        problem = self._problem
        current = dict[int, int]()  # buffer -> its latest version
        for number, buffer in enumerate(problem.buffers):
            if buffer.maker is None:
                current[number] = len(self.versions)
                self.versions.append(Version(number, -1, -1, buffer.nbytes))
        copies = _Copies()
        # only a loop has the beginning of a computation inside, which reads nothing
        loops = {
            kernel.block for kernel in problem.kernels if not kernel.reads and kernel.is_boundary
        }
        # alias set -> the buffer that was written last
        latest = {problem.buffers[number].alias_set: number for number in reversed(current)}
        for time, action in enumerate(self._schedule):
            number = action.number
            if action.kind is Kind.RUN:
                kernel = problem.kernels[number]
                reads = [current[read] for read in kernel.reads]
                ended_buffers = self._ended(number, latest, number in loops)
                ended = [current[buffer] for buffer in ended_buffers]
                latest |= {problem.buffers[written].alias_set: written for written in kernel.writes}
                writes = [self._begin_version(written, time) for written in kernel.writes]
                current.update(zip(kernel.writes, writes, strict=True))
            else:
                reads, writes = self._replay_copy(action, time, current, copies)
                ended = reads
            for version in ended:
                self.versions[version].end = time
            self.reads.append(reads)
            self.writes.append(writes)
        self.outputs = [current[number] for number in problem.outputs]
        for number in self.outputs:
            self.versions[number].end = len(self._schedule)

    def _replay_copy(
        self, action: Action, time: int, current: dict[int, int], copies: _Copies
    ) -> tuple[list[int], list[int]]:
        """The versions that the start or the end of a copy reads, and those that it writes."""
        number = action.number
        reads = list[int]()
        writes = list[int]()
        if action.kind is Kind.OFFLOAD:
            reads = [copies.offloading.setdefault(number, current[number])]
            nbytes = self._problem.buffers[number].nbytes
            copies.host_numbers[number] = len(self.on_host)
            self.on_host.append(Version(number, time, time, nbytes))
            writes = [self._begin_version(number, time, _TOKEN_NBYTES)]
            self.offload_tokens += writes
        elif action.kind is Kind.OFFLOADED:
            token = self.offload_tokens[copies.host_numbers[number]]
            reads = [copies.offloading.pop(number), token]
        elif action.kind is Kind.PREFETCH:
            value = self._begin_version(number, time)
            writes = [value, self._begin_version(number, time, _TOKEN_NBYTES)]
            copies.prefetching[number] = writes
            self.prefetched_from[value] = copies.host_numbers[number]
        else:
            reads = copies.prefetching.pop(number)
            current[number] = reads[0]
        self.on_host[copies.host_numbers[number]].end = time
        return reads, writes

    def _ended(self, number: int, latest: Mapping[int, int], is_loop: bool) -> Iterator[int]:
        """The buffers whose values are live until a kernel runs.

        Values that a loop's body overwrites are not: they are live until the body begins, which
        reads nothing.

        Args:
          latest: alias set -> the buffer that was written last.
        """
        kernel = self._problem.kernels[number]
        buffers = self._problem.buffers
        if kernel.reads:
            for read in kernel.reads:
                if not is_loop or latest[buffers[read].alias_set] == read:
                    yield read
            return
        for written in kernel.writes:
            overwritten = latest.get(buffers[written].alias_set, written)
            if overwritten != written:
                yield overwritten

    def _begin_version(self, buffer: int, time: int, nbytes: int | None = None) -> int:
        if nbytes is None:
            nbytes = self._problem.buffers[buffer].nbytes
        self.versions.append(Version(buffer, time, time, nbytes))
        return len(self.versions) - 1
