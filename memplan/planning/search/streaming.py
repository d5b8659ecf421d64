"""Streaming plan: evict the value with the farthest next use, stalling when the link is busy.

The memory of a processor is managed so (Belady 1966), and a GPU's by IBM's LMS (Le et al., ISMM
2019). Slot by slot, values leave the device as soon as they are made, the one with the farthest
next use first, until the slot keeps a limit. This limit may be lower than the plan's own: copies
then overlap with kernels, one after another and double buffered, as far as the free bytes allow.

Eviction prices each gap by itself. Near the floor, where each copy waits for other copies, it gets
stuck or pays too much; far from the floor it is better, since it also recomputes.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from memplan.planning.search.effort import Streaming
from memplan.planning.search.ledger import Ledger, Offload
from memplan.planning.search.links import CopyScheduler


def stream(
    ledger: Ledger,
    scheduler: CopyScheduler,
    limit: int,
    streaming: Streaming,
    min_nbytes: int,
) -> None:
    """Offload values until the limit is kept, as far as offloads keep it.

    Args:
      min_nbytes: smaller values stay on the device.
    """
    floor_nbytes = int((ledger.tape.floor_nbytes + ledger.slack).max())
    reserve_nbytes = int(streaming.reserve * max(0, limit - floor_nbytes))
    scheduler.refresh()
    _Sweep(ledger, scheduler, limit - reserve_nbytes, min_nbytes).run()
    if streaming.overlap:
        overlap_copies(ledger, scheduler, limit)
    scheduler.refresh()


def overlap_copies(ledger: Ledger, scheduler: CopyScheduler, limit: int) -> None:
    """Overlap stalling copies with kernels, as far as the limit allows."""
    _prefetch_early(ledger, scheduler, limit)
    _offload_long(ledger, scheduler, limit)


class _Sweep:
    """Offloads, slot by slot, each with the shortest residency: kernels wait for both copies."""

    def __init__(
        self,
        ledger: Ledger,
        scheduler: CopyScheduler,
        limit: int,
        min_nbytes: int,
    ) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._limit = limit
        # by slot: values that it makes and that may be offloaded
        self._made: list[list[int]] = [[] for _ in range(ledger.tape.count)]
        for number, value in enumerate(ledger.tape.values):
            if value.may_offload and value.nbytes >= min_nbytes and ledger.needs[number]:
                self._made[value.first_slot].append(number)

    def run(self) -> None:
        ledger = self._ledger
        live = list[int]()
        for slot in range(ledger.tape.count):
            if ledger.load[slot] > self._limit:
                live = [value for value in live if ledger.needs[value][-1] >= slot]
                for offload in self._farthest_first(live, slot):
                    ledger.offload(offload)
                    if ledger.load[slot] <= self._limit:
                        break
            live += self._made[slot]

    def _farthest_first(self, live: list[int], slot: int) -> Iterator[Offload]:
        """Offloads of values that a slot does not need, from before it until their next use."""
        ledger = self._ledger
        gaps = list[tuple[int, int, int]]()
        for value in live:
            needs = ledger.needs[value]
            reader = needs[bisect_left(needs, slot)]
            if reader > slot and ledger.last_touch(value, reader) < slot:
                gaps.append((-reader, -ledger.tape.nbytes[value], value))
        for minus_reader, _, value in sorted(gaps):
            offload = self._scheduler.shortest_residency(value, -minus_reader)
            if offload and offload.end < slot <= offload.prefetch:
                yield offload


def _prefetch_early(ledger: Ledger, scheduler: CopyScheduler, limit: int) -> None:
    """Begin each prefetch in time for its reader, as far as the limit allows, the last first."""
    ends = np.cumsum(ledger.slot_seconds)
    pairs = ((ledger.reader(offload), offload) for offload in ledger.offloads.values())
    readers = [(reader, offload) for reader, offload in pairs if reader is not None]
    readers.sort(key=lambda pair: (-pair[0], -pair[1].prefetch, pair[1].value))
    free_until = math.inf  # the link is free until this second
    for reader, offload in readers:
        value = offload.value
        later, earlier = scheduler.copy_slots_of(value)
        needed_s = float(ends[reader - 1]) + ledger.lead_s(value, reader)
        start_s = min(needed_s, free_until) - scheduler.busy_s(value)
        in_time = earlier[bisect_right(ends, start_s, hi=reader) - 1]
        on_host = later[max(offload.end, ledger.on_host[value]) + 1]
        first = max(in_time, on_host)
        load = _load_with(ledger, value, first + 1, offload.prefetch + 1)
        full = np.flatnonzero(load > limit)
        prefetch = later[first + 1 + int(full[-1])] if full.size else first
        if prefetch < offload.prefetch and (value, prefetch) not in ledger.offloads:
            offload = _replace(ledger, offload, replace(offload, prefetch=prefetch), limit)
        free_until = start_s if offload.prefetch <= first else float(ends[offload.prefetch])


def _offload_long(ledger: Ledger, scheduler: CopyScheduler, limit: int) -> None:
    """Let kernels run until each copy to the host ends, as far as the limit allows."""
    ends = np.cumsum(ledger.slot_seconds)
    count = ledger.tape.count
    free_from = 0.0  # the link is free from this second on
    stalled_s = 0.0
    first_prefetch = dict[int, int]()  # by value
    for offload in ledger.offloads.values():
        value = offload.value
        first_prefetch[value] = min(offload.prefetch, first_prefetch.get(value, count))
    starts = [(o.start, o) for o in ledger.offloads.values() if o.start is not None]
    for start, offload in sorted(starts, key=lambda item: (item[0], item[1].end, item[1].value)):
        value = offload.value
        later, earlier = scheduler.copy_slots_of(value)
        free_from = max(free_from, float(ends[start]) + stalled_s) + scheduler.busy_s(value)
        complete = later[min(bisect_left(ends, free_from - stalled_s), count - 1)]
        last = min(complete, earlier[first_prefetch[value] - 1])
        load = _load_with(ledger, value, offload.end + 1, last + 1)
        full = np.flatnonzero(load > limit)
        end = earlier[offload.end + int(full[0])] if full.size else last
        if end > offload.end:
            offload = _replace(ledger, offload, replace(offload, end=end), limit)
        stalled_s += max(0.0, free_from - stalled_s - float(ends[offload.end]))


def _load_with(ledger: Ledger, value: int, first: int, end: int) -> np.ndarray:
    """Bytes of slots [first, end) if a value is on the device as well."""
    return ledger.load[first:end] + ledger.tape.nbytes[value]


def _replace(ledger: Ledger, old: Offload, new: Offload, limit: int) -> Offload:
    """Replace an offload if that keeps the limit; returns the one that remains.

    A recomputed version of the value may live longer with the new one.
    """
    bound = max(limit, ledger.peak_nbytes)
    ledger.undo_offload(old)
    ledger.offload(new)
    if ledger.peak_nbytes <= bound:
        return new
    ledger.undo_offload(new)
    ledger.offload(old)
    return old
