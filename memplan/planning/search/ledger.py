"""The bytes of a plan, by slot, updated as recomputations and offloads are added and undone.

A *ledger* is a tape (see `tape`) with a plan. It updates liveness, so it knows the bytes of a
change without a layout. Moments count half slots: 2t is the prelude of slot t, 2t + 1 the end of
its own work. A version of a value is made in its first slot (2t + 1), recomputed in a prelude (2t),
or prefetched after a slot (2t + 1); the last version before a need serves it.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from memplan.planning.packing import live_nbytes
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.planning.search.tape import Aliases, Tape

ABSENT_PENALTY_NBYTES = 1 << 44
"""Penalty bytes of a pinned value that is live in its absent slot.

They exceed all memory, so that every plan that keeps a limit keeps the pins.
"""

Recomputation = tuple[int, int]
"""An operation, and the slot in whose prelude it runs."""


@dataclass(frozen=True, slots=True)
class Offload:
    """A value that is on the host for a while."""

    value: int
    # the slot after which its copy to the host begins; None: an earlier offload left it there
    start: int | None
    end: int  # the last slot in which it is still on the device
    prefetch: int  # the slot after which its copy back begins, for the next slot that needs it


class Ledger:
    """A plan on a tape; `recompute` and `offload` change it, and can be undone.

    Attributes:
      preludes: by slot: the operations that are recomputed before it, ascending.
      offloads: by (value, slot after which the prefetch begins).
      on_host: value -> the slot after which its first copy to the host is complete.
      host_nbytes: of the values on the host.
      needs: by value: the slots that need it, ascending.
      throughout_nbytes: by slot: bytes that are live from its start to its end.
      slack: by slot: the layout's bytes that the values do not account for.
      slot_seconds: by slot, prelude included.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.preludes: list[list[int]] = [[] for _ in range(tape.count)]
        self.offloads: dict[tuple[int, int], Offload] = {}
        self.on_host: dict[int, int] = {}
        self.host_nbytes = 0
        # by value: the moments at which its versions are made, ascending
        self._moments: list[list[int]] = [[2 * value.first_slot + 1] for value in tape.values]
        # by value: slot -> number of its needs; of its needs until the end of its own work
        self._need_counts: list[dict[int, int]] = [{} for _ in tape.nbytes]
        self._own_need_counts: list[dict[int, int]] = [{} for _ in tape.nbytes]
        for slot, work in enumerate(tape.slots):
            for value in work.reads:
                self._need_counts[value][slot] = 1
                self._own_need_counts[value][slot] = 1
        self.needs: list[list[int]] = [sorted(counts) for counts in self._need_counts]
        change = np.zeros(tape.count + 1, np.int64)
        for value in range(len(tape.nbytes)):
            for first, end in self._spans(value):
                change[first] += tape.nbytes[value]
                change[end] -= tape.nbytes[value]
        self.throughout_nbytes = np.cumsum(change)[:-1]
        for value in self.unkept_pins():
            self.throughout_nbytes[tape.values[value].absent_slot] += ABSENT_PENALTY_NBYTES
        self._peak_above = np.zeros(tape.count, np.int64)  # by slot: above `throughout_nbytes`
        self._load: np.ndarray | None = None
        self._dirty = set(range(tape.count))  # slots whose peak `load` must count again
        self.slack = np.zeros(tape.count, np.int64)
        self.slot_seconds = np.array([slot.seconds for slot in tape.slots])

    @property
    def load(self) -> np.ndarray:
        """Peak bytes of each slot."""
        if self._load is None:
            for slot in self._dirty:
                self._recount(slot)
            self._dirty.clear()
            self._load = self.throughout_nbytes + self._peak_above + self.slack
        return self._load

    def set_slack(self, nbytes: np.ndarray) -> None:
        self.slack = nbytes
        self._load = None

    @property
    def peak_nbytes(self) -> int:
        return int(self.load.max())

    def restore(
        self,
        recomputations: Iterable[Recomputation],
        offloads: Iterable[Offload] = (),
    ) -> None:
        """Change the plan to these recomputations and offloads."""
        new_recomputations = set(recomputations)
        new_offloads = set(offloads)
        for offload in list(self.offloads.values()):
            if offload not in new_offloads:
                self.undo_offload(offload)
        for op, slot in set(self.recomputations()) - new_recomputations:
            self.undo_recompute(op, slot)
        for op, slot in new_recomputations - set(self.recomputations()):
            self.recompute(op, slot)
        for offload in new_offloads - set(self.offloads.values()):
            self.offload(offload)

    def recomputations(self) -> list[Recomputation]:
        """Ordered by slot."""
        return [(op, slot) for slot, ops in enumerate(self.preludes) for op in ops]

    def version(self, value: int, slot: int) -> tuple[int, int]:
        """The version that serves a need in a slot: its moment, and the last slot that needs it."""
        moments = self._moments[value]
        needs = self.needs[value]
        index = bisect_right(moments, 2 * slot) - 1
        end = len(needs)
        if index + 1 < len(moments):
            end = bisect_left(needs, (moments[index + 1] + 1) >> 1)
        last = needs[end - 1] if end else -1
        return moments[index], max(last, moments[index] >> 1)

    def last_touch(self, value: int, slot: int) -> int:
        """The last earlier slot in which a value is made or needed."""
        moments = self._moments[value]
        needs = self.needs[value]
        index = bisect_left(needs, slot)
        last_made = moments[bisect_left(moments, 2 * slot) - 1] >> 1
        return max(last_made, needs[index - 1] if index else -1)

    def reader(self, offload: Offload) -> int | None:
        """The slot that waits for the prefetch: the next that needs the value.

        None if a later version serves that need.
        """
        needs = self.needs[offload.value]
        moments = self._moments[offload.value]
        index = bisect_right(needs, offload.prefetch)
        if index == len(needs):
            return None
        moment = moments[bisect_right(moments, 2 * needs[index]) - 1]
        return needs[index] if moment == 2 * offload.prefetch + 1 else None

    def position(self, value: int, slot: int) -> int:
        """How many recomputations in a slot's prelude precede the first that reads a value."""
        operations = self.tape.operations
        prelude = self.preludes[slot]
        for number, op in enumerate(prelude):
            if value in operations[op].reads:
                return number
        return len(prelude)

    def lead_s(self, value: int, slot: int) -> float:
        """Seconds from the start of a slot's prelude to the first read of a value in the slot."""
        prelude = self.preludes[slot]
        if not prelude:
            return 0.0
        operations = self.tape.operations
        return sum(operations[op].seconds or 0.0 for op in prelude[: self.position(value, slot)])

    def read_by_own_work(self, value: int, slot: int) -> bool:
        """Does a slot's own work read a value, which is then live until its end?"""
        return slot in self._own_need_counts[value]

    def _versions(self, value: int) -> list[tuple[int, int]]:
        """The moment of each version, and the last slot that needs it; -1 if none does."""
        moments = self._moments[value]
        needs = self.needs[value]
        versions = []
        begin = 0
        for number, moment in enumerate(moments):
            end = len(needs)
            if number + 1 < len(moments):
                end = bisect_left(needs, (moments[number + 1] + 1) >> 1, begin)
            versions.append((moment, needs[end - 1] if end > begin else -1))
            begin = end
        return versions

    def _spans(self, value: int) -> list[tuple[int, int]]:
        """Spans [first, end) of slots throughout which a version is live."""
        own_needs = self._own_need_counts[value]
        spans = []
        for moment, last in self._versions(value):
            first = (moment >> 1) + 1
            end = last + (last in own_needs)
            if first < end:
                spans.append((first, end))
        return spans

    def recompute(self, op: int, slot: int) -> None:
        """Run an operation in the prelude of a slot."""
        self._recompute(op, slot, +1)

    def undo_recompute(self, op: int, slot: int) -> None:
        self._recompute(op, slot, -1)

    def _recompute(self, op: int, slot: int, sign: int) -> None:
        operation = self.tape.operations[op]
        self._dirty.add(slot)
        for value in operation.writes:
            before = self._before_change(value)
            if sign > 0:
                insort(self._moments[value], 2 * slot)
            else:
                self._moments[value].remove(2 * slot)
            self._after_change(value, before)
        for value in operation.reads:
            before = self._before_change(value)
            self._need(value, slot, sign)
            self._after_change(value, before)
        self.slot_seconds[slot] += sign * (operation.seconds or 0.0)
        if sign > 0:
            insort(self.preludes[slot], op)
        else:
            self.preludes[slot].remove(op)
        self._load = None

    def undo_within(self, op: int, slot: int, limit: int) -> bool:
        """Undo a recomputation unless a slot then exceeds the limit; return whether it was undone.

        The slots that need no count are looked at first. If it is not undone, nothing is counted
        again.
        """
        load = self.load
        self.undo_recompute(op, slot)
        undone = self.throughout_nbytes + self._peak_above + self.slack
        dirty = sorted(self._dirty)
        counted = np.ones(len(undone), bool)
        counted[dirty] = False
        peaks = dict[int, int]()  # by slot: before it was counted again
        fits = undone.max(where=counted, initial=0) <= limit
        for number in dirty if fits else ():
            peaks[number] = self._peak_above[number]
            self._recount(number)
            undone[number] += self._peak_above[number] - peaks[number]
            if undone[number] > limit:
                fits = False
                break
        if not fits:
            self.recompute(op, slot)
            for number, peak in peaks.items():
                self._peak_above[number] = peak
        self._load = undone if fits else load
        self._dirty.clear()
        return bool(fits)

    def is_needed(self, op: int, slot: int, limit: int) -> bool:
        """Does undoing this recomputation surely exceed the limit?

        A result would then be live since it was last made or needed. At most, all operands would be
        free meanwhile.
        """
        operation = self.tape.operations[op]
        nbytes = self.tape.nbytes
        freed_nbytes = sum(nbytes[value] for value in operation.reads)
        for value in operation.writes:
            moments = self._moments[value]
            needs = self.needs[value]
            index = bisect_left(needs, slot)
            following = bisect_right(moments, 2 * slot)  # number of the next version
            end = (moments[following] + 1) >> 1 if following < len(moments) else self.tape.count
            is_read = index < len(needs) and needs[index] < end
            gap = self.load[self.last_touch(value, slot) + 1 : slot]
            if is_read and gap.size and gap.max() + nbytes[value] - freed_nbytes > limit:
                return True
        return False

    def offload(self, offload: Offload) -> None:
        self._offload(offload, +1)
        self.offloads[offload.value, offload.prefetch] = offload

    def undo_offload(self, offload: Offload) -> None:
        del self.offloads[offload.value, offload.prefetch]
        self._offload(offload, -1)

    def _offload(self, offload: Offload, sign: int) -> None:
        value = offload.value
        before = self._before_change(value)
        if sign > 0:
            insort(self._moments[value], 2 * offload.prefetch + 1)
        else:
            self._moments[value].remove(2 * offload.prefetch + 1)
        if offload.start is not None:
            self.host_nbytes += sign * self.tape.nbytes[value]
            if sign > 0:
                self.on_host[value] = offload.end
            else:
                del self.on_host[value]
            self._need(value, offload.end, sign)
            counts = self._own_need_counts[value]
            counts[offload.end] = counts.get(offload.end, 0) + sign
            if not counts[offload.end]:
                del counts[offload.end]
        self._after_change(value, before)

    def _need(self, value: int, slot: int, sign: int) -> None:
        counts = self._need_counts[value]
        count = counts.get(slot, 0) + sign
        if count == sign == 1:
            insort(self.needs[value], slot)
        if count:
            counts[slot] = count
        else:
            del counts[slot]
            self.needs[value].remove(slot)

    def _before_change(self, value: int) -> list[tuple[int, int]]:
        """Spans in which a value is live throughout.

        Slots that a change of the value may affect become dirty.
        """
        self._mark_dirty(value)
        return self._spans(value)

    def _after_change(self, value: int, before: list[tuple[int, int]]) -> None:
        after = self._spans(value)
        nbytes = self.tape.nbytes[value]
        self._load = None
        for first, end in before:
            if (first, end) not in after:
                self.throughout_nbytes[first:end] -= nbytes
        for first, end in after:
            if (first, end) not in before:
                self.throughout_nbytes[first:end] += nbytes
        self._add_penalty(value, before, -1)
        self._add_penalty(value, after, +1)
        self._mark_dirty(value)

    def unkept_pins(self) -> list[int]:
        """Pinned values that are still live where they must be absent."""
        values = enumerate(self.tape.values)
        pinned = [number for number, value in values if value.absent_slot is not None]
        return [value for value in pinned if self._breaks_pin(value, self._spans(value))]

    def _breaks_pin(self, value: int, spans: Iterable[tuple[int, int]]) -> bool:
        """Is a value with these spans live where it must be absent?"""
        slot = self.tape.values[value].absent_slot
        return slot is not None and any(first <= slot < end for first, end in spans)

    def _add_penalty(self, value: int, spans: Iterable[tuple[int, int]], sign: int) -> None:
        """Add the penalty of a value that is live where it must be absent."""
        if self._breaks_pin(value, spans):
            slot = self.tape.values[value].absent_slot
            self.throughout_nbytes[slot] += sign * ABSENT_PENALTY_NBYTES

    def _mark_dirty(self, value: int) -> None:
        for moment, last in self._versions(value):
            if not moment & 1:
                self._dirty.add(moment >> 1)
            if last >= 0 and (self.preludes[last] or self.tape.slots[last].may_alias):
                self._dirty.add(last)

    def _recount(self, slot: int) -> None:
        """Recompute the peak of a slot above the bytes that are live throughout."""
        tape = self.tape
        ops = self.preludes[slot]
        work = tape.slots[slot]
        # while its own work runs
        work_nbytes = work.nbytes - self._aliased_nbytes(work.may_alias, slot)
        work_nbytes += sum(tape.nbytes[value] for value in work.writes)
        if not ops:
            self._peak_above[slot] = work_nbytes
            return
        operations = [tape.operations[op] for op in ops]
        last_read = {value: number for number, op in enumerate(operations) for value in op.reads}
        change = [0] * (len(ops) + 2)
        recomputed: set[int] = set()
        for number, op in enumerate(operations):
            for value in op.writes:
                recomputed.add(value)
                nbytes = tape.nbytes[value]
                _, last = self.version(value, slot)
                change[number] += nbytes
                if last > slot or slot in self._own_need_counts[value]:
                    work_nbytes += nbytes
                else:
                    change[last_read.get(value, number) + 1] -= nbytes
        for value, number in last_read.items():
            if value not in recomputed:
                _, last = self.version(value, slot)
                if last == slot and slot not in self._own_need_counts[value]:
                    change[0] += tape.nbytes[value]
                    change[number + 1] -= tape.nbytes[value]
        peak_nbytes = running_nbytes = 0
        for number, op in enumerate(operations):
            running_nbytes += change[number]
            sources = {source for _, overwritten in op.may_alias for source in overwritten}
            own_reads = {source for source in sources if self.read_by_own_work(source, slot)}
            read_later = own_reads | {source for source in sources if last_read[source] > number}
            aliased_nbytes = self._aliased_nbytes(op.may_alias, slot, read_later)
            peak_nbytes = max(peak_nbytes, running_nbytes - aliased_nbytes)
        self._peak_above[slot] = max(work_nbytes, peak_nbytes)

    def _aliased_nbytes(self, aliases: Aliases, slot: int, read_later: Collection[int] = ()) -> int:
        """Bytes of results that overwrite operands at their last read in the slot.

        Args:
          read_later: values that later work in the same slot reads.
        """
        nbytes = 0
        overwritten = set[int]()
        for value, sources in aliases:
            for source in sources:
                moment, last = self.version(source, slot)
                # a prefetch makes an element of a tuple, which nothing overwrites
                first_moment = 2 * self.tape.values[source].first_slot + 1
                is_prefetched = moment & 1 and moment != first_moment
                ends_here = last <= slot and source not in read_later
                if ends_here and source not in overwritten and not is_prefetched:
                    overwritten.add(source)
                    nbytes += self.tape.nbytes[value]
                    break
        return nbytes


def reconcile(problem: Problem, tape: Tape) -> Tape:
    """The tape with each slot's `nbytes` set to the layout's bytes without the values' bytes."""
    unaccounted = live_nbytes(problem, runs(tape.order)) - Ledger(tape).load
    slots = zip(tape.slots, unaccounted.tolist(), strict=True)
    return replace(tape, slots=tuple(replace(slot, nbytes=nbytes) for slot, nbytes in slots))
