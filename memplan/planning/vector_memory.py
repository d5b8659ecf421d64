"""Predicts which temporaries XLA:TPU keeps in a memory in the cores instead of on the device.

XLA assigns that memory after it has scheduled the module. It visits values by what they gain, the
accesses divided by the square root of the bytes (`MemoryBoundednessBufferIntervalComparator`). A
value is never on the device if its bytes are free from its first access to its last, and if no two
accesses are too far apart (`CostAnalysisPrefetchIntervalPicker`). Arguments and outputs are copied
to that memory and back, so that they take some of it while a kernel uses them. Other values that
are there for a part of the time are not followed here.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from memplan.planning.liveness import Liveness
from memplan.planning.problem import Kernel, Problem, Role

# A value in the entry stays while kernels move at most this many times its bytes between two
# accesses; inside of a loop it stays however many they move. Of 5, 8, 10, 12, 16, 20 and 30 it is
# the most exact: of 27 plans on v5e, v5p and v6e (`experiments.bench tpu`) half are within 0.6 % of
# XLA's bytes, all within 8 %.
_MOST_TRAFFIC = 10
# A larger value counts as on the device. Of MLPs on a v5e those of 57 MiB were in the cores, those
# of 64 not; on a v6e some of 64 were, and two plans take 6 and 8 % less than predicted.
_LARGEST_NBYTES = 60 * 2**20


class VectorMemory:
    """What is in the memory of the cores, by time."""

    def __init__(self, problem: Problem, live: Liveness) -> None:
        self._room = problem.vector_memory_bytes
        self._most_bytes = min(self._room, _LARGEST_NBYTES)
        self._live = live
        self._used = np.zeros(len(live.reads) + 2, np.int64)  # from time -1
        self._accesses = defaultdict[int, list[int]](list)  # by version: times
        self._moved = [0]  # bytes that kernels moved before each time
        outside = {
            number
            for number, version in enumerate(live.versions)
            if problem.buffers[version.buffer].role in (Role.ARGUMENT, Role.OUTPUT)
            and version.nbytes <= self._room
        }
        for time, (reads, writes) in enumerate(zip(live.reads, live.writes, strict=True)):
            for number in (*reads, *writes):
                self._accesses[number].append(time)
            moved = {*reads, *writes} if _moves_bytes(live.kernel(time)) else set[int]()
            self._moved.append(self._moved[-1] + self._nbytes(moved))
            self._used[time + 1] = self._nbytes(moved & outside)

    def kept(self, groups: Iterable[Sequence[int]]) -> frozenset[int]:
        """The first versions of the groups that are never on the device.

        Args:
          groups: versions of temporaries that share memory.
        """
        candidates = []
        for group in groups:
            versions = [self._live.versions[number] for number in group]
            nbytes = max(version.nbytes for version in versions)
            if 0 < nbytes <= self._most_bytes and self._may_stay(group, nbytes):
                gain = sum(len(self._accesses[number]) for number in group) * nbytes**0.5
                first = min(version.start for version in versions)
                last = max(version.end for version in versions)
                candidates.append((-gain, group[0], slice(first + 1, last + 2), nbytes))
        kept = set[int]()
        for _, number, span, nbytes in sorted(candidates, key=lambda candidate: candidate[:2]):
            if self._used[span].max() + nbytes <= self._room:
                self._used[span] += nbytes
                kept.add(number)
        return frozenset(kept)

    def _may_stay(self, group: Sequence[int], nbytes: int) -> bool:
        """Are no two accesses of a group too far apart?"""
        begin = self._live.versions[group[0]].start
        writer = self._live.kernel(begin) if begin >= 0 else None
        if len(group) == 1 and writer is not None and writer.block is not None:
            return True
        times = sorted(time for number in group for time in self._accesses[number])
        gaps = (self._moved[end] - self._moved[start + 1] for start, end in pairwise(times))
        return max(gaps, default=0) <= _MOST_TRAFFIC * nbytes

    def _nbytes(self, numbers: Iterable[int]) -> int:
        return sum(self._live.versions[number].nbytes for number in numbers)


def _moves_bytes(kernel: Kernel | None) -> bool:
    """Does a kernel move its operands and results, other than a loop, whose body does?"""
    return kernel is not None and not kernel.is_boundary and kernel.trips == 1
