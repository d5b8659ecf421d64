"""When the links to the host are busy in a plan, and when another offload can use them.

Each direction has one copy at a time, in the order of their starts; kernels stall for a copy that is late.
`CopyScheduler` places a candidate offload as XLA's latency-hiding scheduler places copies: out as early, and back as
late, as no kernel stalls for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.schedule import CopySeconds, Kind
from memplan.planning.search.ledger import Ledger, Offload

Busy = list[tuple[float, float]]

_AT_ONE_SLOT = (Kind.PREFETCHED, Kind.OFFLOAD, Kind.OFFLOADED, Kind.PREFETCH)  # order at one slot


class Links:
    """The timeline of a ledger's plan, with stalls for copies."""

    def __init__(self, ledger: Ledger, copy_s: CopySeconds) -> None:
        self._ledger, self._copy_s = ledger, copy_s
        # offloads, prefetches: busy spans of the link in each direction, ordered
        self.offloads: Busy = []
        self.prefetches: Busy = []
        self.waited_for: dict[Offload, float] = {}  # for how long kernels stall for an offload, in their order
        ends = np.cumsum(ledger.slot_seconds)
        self.ends = ends + np.cumsum(self._simulate(ends))  # by slot: end of its own work
        self.starts = np.concatenate([[0.0], self.ends[:-1]])  # by slot: start of its prelude
        last = (busy[-1][1] for busy in (self.offloads, self.prefetches) if busy)
        self.seconds = max(float(self.ends[-1]), *last, 0.0)  # of the whole plan

    def _simulate(self, ends: np.ndarray) -> np.ndarray:
        """Seconds by slot that kernels stall before its end or right after it."""
        stalls_s = np.zeros(len(ends))
        if not self._ledger.offloads:
            return stalls_s
        late = 0.0
        on_host_at: dict[int, float] = {}
        back_at: dict[tuple[int, int], float] = {}
        for slot, kind, offload in events(self._ledger):
            before = slot - 1 if kind is Kind.PREFETCHED else slot
            now = (float(ends[before]) if before >= 0 else 0.0) + late
            value, stall_s = offload.value, 0.0
            if kind is Kind.PREFETCHED:
                stall_s = max(0.0, back_at[value, offload.prefetch] - now)
            elif kind is Kind.OFFLOAD:
                on_host_at[value] = self._copy(self.offloads, value, now)
            elif kind is Kind.OFFLOADED:
                stall_s = max(0.0, on_host_at[value] - now)
            else:
                back_at[value, offload.prefetch] = self._copy(self.prefetches, value, now)
            if stall_s:
                self.waited_for[offload] = self.waited_for.get(offload, 0.0) + stall_s
            late += stall_s
            stalls_s[slot] += stall_s
        return stalls_s

    def _copy(self, busy: Busy, value: int, now: float) -> float:
        """Copy a value once the link is free; returns the end."""
        start = max(now, busy[-1][1]) if busy else now
        end = start + seconds_in_step(self._ledger, self._copy_s, value)
        busy.append((start, end))
        return end


def seconds_in_step(ledger: Ledger, copy_s: CopySeconds, value: int) -> float:
    """Seconds in a step of one copy of a value, which takes place in every trip of the loops around it."""
    return copy_s(ledger.tape.nbytes[value]) * ledger.tape.values[value].times


def plan_seconds(ledger: Ledger, scheduler: CopyScheduler | None) -> float:
    """Seconds of a ledger's plan with its copies; refreshes the scheduler."""
    if scheduler is None:
        return float(ledger.slot_seconds.sum())
    scheduler.refresh()
    return scheduler.links.seconds


def events(ledger: Ledger) -> list[tuple[int, Kind, Offload]]:
    """Slots in order, with the events of offloads there: `PREFETCHED` before the slot, all others after it."""
    found = []
    for offload in ledger.offloads.values():
        reader = ledger.reader(offload)
        if reader is not None:
            found += [(reader, 0, reader, offload), (offload.prefetch, 3, reader, offload)]
        if offload.start is not None:
            found += [(offload.start, 1, offload.end, offload), (offload.end, 2, offload.end, offload)]
    found.sort(key=lambda event: (*event[:3], event[3].value, event[3].prefetch))
    return [(slot, _AT_ONE_SLOT[at], offload) for slot, at, _, offload in found]


@dataclass(frozen=True, slots=True)
class Placement:
    """An offload, the seconds that it keeps a link busy, and those that kernels stall for it."""

    offload: Offload
    busy_s: float
    stall_s: float


class CopyScheduler:
    """Offloads that could be added to those of a ledger.

    Args:
      host_nbytes: limit of all of them together.
    """

    def __init__(self, ledger: Ledger, copy_s: CopySeconds, host_nbytes: int) -> None:
        self._ledger, self._copy_s, self._host_nbytes = ledger, copy_s, host_nbytes
        self._moments: dict[int, tuple[list[int], list[int]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Update to the ledger's current plan."""
        self.links = Links(self._ledger, self._copy_s)

    def may_offload(self, value: int) -> bool:
        """May a value be on the host, and does it fit there?"""
        ledger = self._ledger
        fits = value in ledger.on_host or ledger.host_nbytes + ledger.tape.nbytes[value] <= self._host_nbytes
        return fits and ledger.tape.values[value].may_leave

    def _may_leave(self, value: int, reader: int) -> bool:
        """May a value be on the host before a slot reads it, in the computation that makes it?"""
        tape, one = self._ledger.tape, self._ledger.tape.values[value]
        within = tape.slots[reader].level == tape.operations[one.maker].level
        return within and not one.is_held(reader) and self.may_offload(value)

    def tightest(self, value: int, reader: int) -> Offload | None:
        """The offload before a read with the shortest time on the device: kernels wait for both of its copies."""
        if not self._may_leave(value, reader):
            return None
        ledger, (later, earlier) = self._ledger, self.moments_of(value)
        gone, back = later[ledger.last_touch(value, reader)], earlier[reader - 1]
        if value in ledger.on_host:
            found = Offload(value, None, gone, back) if ledger.on_host[value] <= gone else None
        else:
            moment, _ = ledger.version(value, reader)
            start = later[max(moment >> 1, ledger.tape.values[value].ready_slot)]
            found = Offload(value, start, max(gone, start), back)
        return found if found and found.end < found.prefetch else None

    def busy_s(self, value: int) -> float:
        """Seconds of a copy, one way."""
        return seconds_in_step(self._ledger, self._copy_s, value)

    def moments(self, level: int) -> tuple[list[int], list[int]]:
        """By slot: the next one, and the one before, after which a copy on a level may begin or end.

        The number of slots and -1 where there is none, and for these. A copy is whole within one trip of a loop, or one
        branch.
        """
        if level not in self._moments:
            there = [slot.level == level for slot in self._ledger.tape.slots] + [level == -1]
            count = len(there) - 1
            later, earlier = [count] * (count + 1), [-1] * (count + 1)  # the last of `earlier` is that of -1
            for slot in range(count):
                earlier[slot] = slot if there[slot + 1] else earlier[slot - 1]
            for slot in range(count - 1, -1, -1):
                later[slot] = slot if there[slot + 1] else later[slot + 1]
            self._moments[level] = later, earlier
        return self._moments[level]

    def moments_of(self, value: int) -> tuple[list[int], list[int]]:
        """`moments` of the level on which a value is made."""
        tape = self._ledger.tape
        return self.moments(tape.operations[tape.values[value].maker].level)

    def placements(self, value: int, reader: int, crowded: tuple[int, int]) -> Iterator[Placement]:
        """Ways to have a value on the host before a slot reads it: without stalls, and through all crowded slots.

        Args:
          crowded: the first and the last slot above the limit during which its bytes are live.
        """
        ledger, links, one = self._ledger, self.links, self._ledger.tape.values[value]
        touched = ledger.last_touch(value, reader)
        if (value, touched) in ledger.offloads or not self._may_leave(value, reader):
            return
        later, earlier = self.moments_of(value)
        moment, _ = ledger.version(value, reader)
        made, before = max(moment >> 1, one.ready_slot), later[touched]
        if reader <= one.ready_slot or max(before, later[made]) >= reader:
            return
        busy_s = self.busy_s(value)
        if value in ledger.on_host:
            if ledger.on_host[value] > before:
                return
            start, end, earliest_end, on_host_at = None, before, before, 0.0
        else:
            start, on_host_at = self._offload(later, made, busy_s)
            end = later[max(before, bisect_left(links.ends, on_host_at, hi=len(links.ends) - 1), start)]
            earliest_end = later[max(before, start)]
        prefetch, prefetch_stall_s = self._prefetch(earlier, reader, busy_s)
        for stalling in (False, True):
            gone = end if not stalling else max(earliest_end, min(end, crowded[0] - 1))
            gone = later[gone]
            back = prefetch if not stalling else earlier[min(reader - 1, max(prefetch, crowded[1]))]
            if back <= gone or back >= reader or (stalling and (gone, back) == (end, prefetch)):
                continue
            stall_s = 0.0 if start is None else max(0.0, on_host_at - float(links.ends[gone]))
            if back != prefetch:
                # the end of the copies that are issued before the end of the slot
                at = bisect_right(links.prefetches, (float(links.ends[back]), float("inf")))
                free = max(float(links.ends[back]), links.prefetches[at - 1][1] if at else 0.0)
                stall_s += max(0.0, free + busy_s - float(links.starts[reader]))
            else:
                stall_s += prefetch_stall_s
            yield Placement(Offload(value, start, gone, back), busy_s * (1 if start is None else 2), stall_s)

    def _offload(self, later: Sequence[int], made: int, busy_s: float) -> tuple[int, float]:
        """The first slot, from one on, after which a copy to the host may begin, and the copy's end."""
        ends, slot = self.links.ends, later[made]
        time = float(ends[slot])
        for start, end in self.links.offloads[max(0, bisect_left(self.links.offloads, (time,)) - 1) :]:
            if end <= time:
                continue
            if start - time >= busy_s:
                break
            time = max(time, end)
        slot = later[max(slot, bisect_right(ends, time) - 1)]  # a copy issued early waits for its turn
        return slot, max(time, float(ends[slot])) + busy_s if slot < len(ends) else float("inf")

    def _prefetch(self, earlier: Sequence[int], reader: int, busy_s: float) -> tuple[int, float]:
        """The slot after which a copy back must begin so that nothing stalls, and the stall that remains."""
        links = self.links
        time = float(links.starts[reader])
        for start, end in reversed(links.prefetches):
            if start >= time:
                continue
            if time - end >= busy_s:
                break
            time = min(time, start)
        slot = bisect_right(links.ends, time - busy_s, hi=reader) - 1
        return earlier[slot], 0.0
