"""The times at which a plan's copies keep the links to the host busy, and gaps for another offload.

Each direction has one copy at a time, in the order of their starts; kernels stall for a copy that
is late. `CopyScheduler` places a candidate offload as XLA's latency-hiding scheduler places copies:
out as early, and back as late, as no kernel stalls for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.clock import Clock, first_gap, last_gap
from memplan.planning.schedule import Action, CopySeconds, Kind
from memplan.planning.search.ledger import Ledger, Offload

_ORDER = (Kind.PREFETCHED, Kind.OFFLOAD, Kind.OFFLOADED, Kind.PREFETCH)  # of events at one slot


class Links:
    """The timeline of a ledger's plan, with stalls for copies.

    Attributes:
      offloads, prefetches: busy spans of the link in each direction, in order.
      stalls_s: offload -> seconds that kernels stall for it, in their order.
      starts, ends: by slot: start of its prelude, end of its own work.
      seconds: of the whole plan.
    """

    def __init__(self, ledger: Ledger, copy_s: CopySeconds) -> None:
        self._ledger = ledger
        self._copy_s = copy_s
        clock = Clock()
        self.stalls_s: dict[Offload, float] = {}
        ends = np.cumsum(ledger.slot_seconds)
        self.ends = ends + np.cumsum(self._simulate(ends, clock))
        self.starts = np.concatenate([[0.0], self.ends[:-1]])
        self.offloads = clock.busy[Kind.OFFLOAD]
        self.prefetches = clock.busy[Kind.PREFETCH]
        self.seconds = max(float(self.ends[-1]), clock.end_s)

    def _simulate(self, ends: np.ndarray, clock: Clock) -> np.ndarray:
        """By slot: seconds that kernels stall before its end or right after it."""
        slot_stalls_s = np.zeros(len(ends))
        if not self._ledger.offloads:
            return slot_stalls_s
        total_stall_s = 0.0
        offloaded_at: dict[int, float] = {}
        prefetched_at: dict[tuple[int, int], float] = {}
        for slot, kind, offload in events(self._ledger):
            value = offload.value
            now_s = float(ends[slot])
            if kind is Kind.PREFETCHED:
                now_s = float(ends[slot - 1]) + self._ledger.lead_s(value, slot)
            clock.now_s = now_s + total_stall_s
            stall_s = 0.0
            if kind is Kind.PREFETCHED:
                stall_s = clock.wait(prefetched_at[value, offload.prefetch])
            elif kind is Kind.OFFLOAD:
                _, offloaded_at[value] = clock.copy(kind, self.busy_s(value))
            elif kind is Kind.OFFLOADED:
                stall_s = clock.wait(offloaded_at[value])
            else:
                _, prefetched_at[value, offload.prefetch] = clock.copy(kind, self.busy_s(value))
            if stall_s:
                self.stalls_s[offload] = self.stalls_s.get(offload, 0.0) + stall_s
            total_stall_s += stall_s
            slot_stalls_s[slot] += stall_s
        return slot_stalls_s

    def busy_s(self, value: int) -> float:
        """Seconds in a step of a value's copies one way: one in every trip of its loops."""
        tape = self._ledger.tape
        return self._copy_s(tape.nbytes[value]) * tape.values[value].times


def plan_seconds(ledger: Ledger, scheduler: CopyScheduler | None) -> float:
    """Seconds of a ledger's plan with its copies; refreshes the scheduler."""
    if scheduler is None:
        return float(ledger.slot_seconds.sum())
    scheduler.refresh()
    return scheduler.links.seconds


def events(ledger: Ledger) -> list[tuple[int, Kind, Offload]]:
    """The starts and ends of copies, with their slots, in order.

    `PREFETCHED` comes right before the first kernel that reads the value in its slot, the other
    events after the slot.
    """
    # slot, index of the kind in `_ORDER`, slot that waits for the copy (before it: the position of
    # the first reader), value, slot of the prefetch: no two entries are equal up to here; offload
    entries = list[tuple[int, int, int, int, int, Offload]]()
    for (value, prefetch), offload in ledger.offloads.items():
        reader = ledger.reader(offload)
        if reader is not None:
            position = ledger.position(value, reader)
            entries.append((reader, 0, position, value, prefetch, offload))
            entries.append((prefetch, 3, reader, value, prefetch, offload))
        if offload.start is not None:
            entries.append((offload.start, 1, offload.end, value, prefetch, offload))
            entries.append((offload.end, 2, offload.end, value, prefetch, offload))
    entries.sort()
    return [(slot, _ORDER[index], offload) for slot, index, _, _, _, offload in entries]


def slot_actions(ledger: Ledger) -> list[list[Action]]:
    """A ledger's kernels and copies by slot, in order."""
    tape = ledger.tape
    before = defaultdict[tuple[int, int], list[Action]](list)  # by slot, position in its prelude
    after = defaultdict[int, list[Action]](list)
    for slot, kind, offload in events(ledger):
        action = Action(kind, tape.values[offload.value].buffer)
        if kind is Kind.PREFETCHED:
            before[slot, ledger.position(offload.value, slot)].append(action)
        else:
            after[slot].append(action)
    actions = list[list[Action]]()
    for slot, prelude in enumerate(ledger.preludes):
        work = tape.slots[slot].operation
        actions.append([])
        for position, op in enumerate([*prelude, work]):
            actions[slot] += before[slot, position]
            if op is not None:
                actions[slot].append(Action(Kind.RUN, tape.operations[op].kernel))
        actions[slot] += after[slot]
    return actions


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
        self._ledger = ledger
        self._copy_s = copy_s
        self._host_nbytes = host_nbytes
        self._copy_slots: dict[int, tuple[list[int], list[int]]] = {}  # by block
        self.refresh()

    def refresh(self) -> None:
        """Update to the ledger's current plan."""
        self.links = Links(self._ledger, self._copy_s)

    def may_offload(self, value: int) -> bool:
        """May a value be on the host, and does it fit there?"""
        ledger = self._ledger
        host_nbytes = ledger.host_nbytes + ledger.tape.nbytes[value]
        fits = value in ledger.on_host or host_nbytes <= self._host_nbytes
        return fits and ledger.tape.values[value].may_offload

    def _may_offload_before(self, number: int, reader: int) -> bool:
        """May a value be on the host before a slot reads it, in the computation that makes it?"""
        tape = self._ledger.tape
        value = tape.values[number]
        is_same_block = tape.slots[reader].block == tape.operations[value.maker].block
        return is_same_block and not value.is_read_by_pair(reader) and self.may_offload(number)

    def shortest_residency(self, value: int, reader: int) -> Offload | None:
        """The offload with the shortest device residency; both copies may stall."""
        if not self._may_offload_before(value, reader):
            return None
        ledger = self._ledger
        later, earlier = self.copy_slots_of(value)
        end = later[ledger.last_touch(value, reader)]
        prefetch = earlier[reader - 1]
        start = None
        if value in ledger.on_host:
            if ledger.on_host[value] > end:
                return None
        else:
            moment, _ = ledger.version(value, reader)
            start = later[max(moment >> 1, ledger.tape.values[value].ready_slot)]
            end = max(end, start)
        return Offload(value, start, end, prefetch) if end < prefetch else None

    def busy_s(self, value: int) -> float:
        """Seconds of a copy, one way."""
        return self.links.busy_s(value)

    def copy_slots(self, block: int) -> tuple[list[int], list[int]]:
        """By slot: the next slot, and the one before, after which a block's copy may begin or end.

        Both include the slot itself. If there is none, and for these numbers themselves, they are
        the number of slots and -1. A copy is within one trip of a loop, or one branch.
        """
        if block not in self._copy_slots:
            # a copy between two slots is in the block of the second slot's prelude
            follows = [slot.block == block for slot in self._ledger.tape.slots] + [block == -1]
            count = len(follows) - 1
            later = [count] * (count + 1)
            earlier = [-1] * (count + 1)  # the last entry is that of slot -1
            for slot in range(count):
                earlier[slot] = slot if follows[slot + 1] else earlier[slot - 1]
            for slot in range(count - 1, -1, -1):
                later[slot] = slot if follows[slot + 1] else later[slot + 1]
            self._copy_slots[block] = later, earlier
        return self._copy_slots[block]

    def copy_slots_of(self, value: int) -> tuple[list[int], list[int]]:
        """`copy_slots` of the block in which a value is made."""
        tape = self._ledger.tape
        return self.copy_slots(tape.operations[tape.values[value].maker].block)

    def placements(self, number: int, reader: int, crowded: tuple[int, int]) -> Iterator[Placement]:
        """Candidates for a value on the host before a slot reads it.

        One stalls no kernel, the other is on the host during all crowded slots.

        Args:
          crowded: the first and the last slot above the limit during which its bytes are live.
        """
        ledger = self._ledger
        links = self.links
        value = ledger.tape.values[number]
        touched = ledger.last_touch(number, reader)
        if (number, touched) in ledger.offloads or not self._may_offload_before(number, reader):
            return
        later, earlier = self.copy_slots_of(number)
        moment, _ = ledger.version(number, reader)
        ready = max(moment >> 1, value.ready_slot)
        last_use = later[touched]
        if reader <= value.ready_slot or max(last_use, later[ready]) >= reader:
            return
        busy_s = self.busy_s(number)
        start = None
        end = earliest_end = last_use
        offloaded_at = 0.0
        if number not in ledger.on_host:
            start, offloaded_at = self._first_offload(later, ready, busy_s)
            complete = bisect_left(links.ends, offloaded_at, hi=len(links.ends) - 1)
            end = later[max(last_use, complete, start)]
            earliest_end = later[max(last_use, start)]
        elif ledger.on_host[number] > last_use:
            return
        prefetch = self._last_prefetch(number, earlier, reader, busy_s)
        crowded_end = later[max(earliest_end, min(end, crowded[0] - 1))]
        crowded_prefetch = earlier[min(reader - 1, max(prefetch, crowded[1]))]
        spans = [(later[end], prefetch)]
        if (crowded_end, crowded_prefetch) != (end, prefetch):
            spans.append((crowded_end, crowded_prefetch))
        for leave, back in spans:
            if back <= leave or back >= reader:
                continue
            stall_s = 0.0
            if start is not None:
                stall_s = max(0.0, offloaded_at - float(links.ends[leave]))
            if back != prefetch:
                stall_s += self._prefetch_stall(number, back, reader, busy_s)
            copies_s = busy_s * (1 if start is None else 2)
            yield Placement(Offload(number, start, leave, back), copies_s, stall_s)

    def _prefetch_stall(self, number: int, prefetch: int, reader: int, busy_s: float) -> float:
        """Seconds that a slot waits for a prefetch that begins after another slot."""
        links = self.links
        needed_s = self._needed_s(number, reader)
        issued_s = float(links.ends[prefetch])
        # copies that are issued before the end of the slot go first
        index = bisect_right(links.prefetches, (issued_s, float("inf")))
        free_s = max(issued_s, links.prefetches[index - 1][1] if index else 0.0)
        return max(0.0, free_s + busy_s - needed_s)

    def _first_offload(self, later: Sequence[int], ready: int, busy_s: float) -> tuple[int, float]:
        """The first slot after which a copy to the host may begin, and the copy's end.

        Args:
          ready: the first slot that counts.
        """
        ends = self.links.ends
        slot = later[ready]
        time = first_gap(self.links.offloads, float(ends[slot]), busy_s)
        slot = later[max(slot, bisect_right(ends, time) - 1)]  # a copy issued early waits its turn
        if slot >= len(ends):
            return slot, float("inf")
        return slot, max(time, float(ends[slot])) + busy_s

    def _needed_s(self, number: int, reader: int) -> float:
        """When a slot first reads a value."""
        return float(self.links.starts[reader]) + self._ledger.lead_s(number, reader)

    def _last_prefetch(
        self,
        number: int,
        earlier: Sequence[int],
        reader: int,
        busy_s: float,
    ) -> int:
        """The last slot after which a copy back may begin so that no kernel stalls."""
        links = self.links
        start = last_gap(links.prefetches, self._needed_s(number, reader), busy_s)
        return earlier[bisect_right(links.ends, start, hi=reader) - 1]
