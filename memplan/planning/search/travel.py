"""A plan in which values travel: what is read latest is on the host, and kernels wait where the link needs it.

The memory of a processor is managed so, and a GPU's by IBM's LMS (Le et al., ISMM 2019). Slot by slot, the values that
are needed again latest leave (Belady 1966), as soon as they are made, until the slot keeps a limit. This limit is
lower than the plan's own: in the room between, copies then take place beside kernels, one after another and double
buffered, as far as they find room.

Eviction prices each gap by itself, and near the floor, where each copy waits for others, gets stuck or pays too much;
far from the floor it is better, as it also recomputes.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from memplan.planning.search.effort import Travel
from memplan.planning.search.ledger import Ledger, Offload
from memplan.planning.search.links import CopyScheduler


def travel(ledger: Ledger, scheduler: CopyScheduler, limit: int, how: Travel, least_nbytes: int) -> None:
    """Offload values of at least `least_nbytes` until the limit is kept, as far as that does it."""
    room = max(0, limit - int((ledger.tape.least_nbytes + ledger.slack).max()))
    scheduler.refresh()
    _Sweep(ledger, scheduler, limit - int(how.reserve * room), least_nbytes).run()
    if how.buffers:
        move_beside_kernels(ledger, scheduler, limit)
    scheduler.refresh()


def move_beside_kernels(ledger: Ledger, scheduler: CopyScheduler, limit: int) -> None:
    """Let copies that kernels wait for take place beside them, one after another, as far as the limit allows."""
    _prefetch_early(ledger, scheduler, limit)
    _offload_long(ledger, scheduler, limit)


class _Sweep:
    """Offloads, slot by slot, each with the shortest time on the device: kernels wait for both copies."""

    def __init__(self, ledger: Ledger, scheduler: CopyScheduler, limit: int, least_nbytes: int) -> None:
        self._ledger, self._scheduler, self._limit = ledger, scheduler, limit
        self._made: list[list[int]] = [[] for _ in range(ledger.tape.count)]  # by slot
        for value, one in enumerate(ledger.tape.values):
            if one.may_leave and one.nbytes >= least_nbytes and ledger.needs[value]:
                self._made[one.first_slot].append(value)

    def run(self) -> None:
        ledger, live = self._ledger, list[int]()
        for slot in range(ledger.tape.count):
            if ledger.load[slot] > self._limit:
                live = [value for value in live if ledger.needs[value][-1] >= slot]
                for offload in self._latest_first(live, slot):
                    ledger.offload(offload)
                    if ledger.load[slot] <= self._limit:
                        break
            live += self._made[slot]

    def _latest_first(self, live: list[int], slot: int) -> Iterator[Offload]:
        """Offloads that end a value's time on the device before a slot that does not need it, by its next need."""
        gaps = list[tuple[int, int, int]]()
        for value in live:
            needs = self._ledger.needs[value]
            reader = needs[bisect_left(needs, slot)]
            if reader > slot and self._ledger.last_touch(value, reader) < slot:
                gaps.append((-reader, -self._ledger.tape.nbytes[value], value))
        for reader, _, value in sorted(gaps):
            if (offload := self._scheduler.tightest(value, -reader)) and offload.end < slot <= offload.prefetch:
                yield offload


def _prefetch_early(ledger: Ledger, scheduler: CopyScheduler, limit: int) -> None:
    """Begin each prefetch as early as its kernel wants it and the limit allows, the last first."""
    ends = np.cumsum(ledger.slot_seconds)
    readers = {one: reader for one in ledger.offloads.values() if (reader := ledger.reader(one)) is not None}
    free = math.inf  # until when the link is
    for one, reader in sorted(readers.items(), key=lambda item: (-item[1], -item[0].prefetch, item[0].value)):
        later, earlier = scheduler.moments_of(one.value)
        wanted = min(float(ends[reader - 1]), free) - scheduler.busy_s(one.value)
        first = max(
            earlier[bisect_right(ends, wanted, hi=reader) - 1], later[max(one.end, ledger.on_host[one.value]) + 1]
        )
        full = np.flatnonzero(_with(ledger, one.value, first + 1, one.prefetch + 1) > limit)
        begin = later[first + 1 + int(full[-1])] if full.size else first
        if begin < one.prefetch and (one.value, begin) not in ledger.offloads:
            one = _replace(ledger, one, replace(one, prefetch=begin), limit)
        free = wanted if one.prefetch <= first else float(ends[one.prefetch])


def _offload_long(ledger: Ledger, scheduler: CopyScheduler, limit: int) -> None:
    """Let kernels run until each copy to the host ends, as far as the limit allows, the first first."""
    ends, count = np.cumsum(ledger.slot_seconds), ledger.tape.count
    free = late = 0.0  # until when the link is not; for how long kernels waited
    back = dict[int, int]()  # value -> its first prefetch
    for one in ledger.offloads.values():
        back[one.value] = min(one.prefetch, back.get(one.value, count))
    leaving = [(one.start, one) for one in ledger.offloads.values() if one.start is not None]
    for start, one in sorted(leaving, key=lambda item: (item[0], item[1].end, item[1].value)):
        later, earlier = scheduler.moments_of(one.value)
        free = max(free, float(ends[start]) + late) + scheduler.busy_s(one.value)
        last = min(later[min(bisect_left(ends, free - late), count - 1)], earlier[back[one.value] - 1])
        full = np.flatnonzero(_with(ledger, one.value, one.end + 1, last + 1) > limit)
        end = earlier[one.end + int(full[0])] if full.size else last
        if end > one.end:
            one = _replace(ledger, one, replace(one, end=end), limit)
        late += max(0.0, free - late - float(ends[one.end]))


def _with(ledger: Ledger, value: int, first: int, end: int) -> np.ndarray:
    """Bytes of slots [first, end) if a value is there, too."""
    return ledger.load[first:end] + ledger.tape.nbytes[value]


def _replace(ledger: Ledger, old: Offload, new: Offload, limit: int) -> Offload:
    """The new offload in place of the old one, if the limit is kept: a value that is made again may live longer."""
    most = max(limit, ledger.peak_nbytes)
    ledger.undo_offload(old)
    ledger.offload(new)
    if ledger.peak_nbytes <= most:
        return new
    ledger.undo_offload(new)
    ledger.offload(old)
    return old
