"""The bytes of a plan, by slot, updated as recomputations and offloads are added and undone.

A *ledger* is a tape (see `tape`) with a plan. It updates liveness, so it knows the bytes of a change without a layout.
Moments count half slots: 2t is the prelude of slot t, 2t + 1 the end of its own work. A version of a value is made in
its first slot (2t + 1), recomputed in a prelude (2t), or prefetched after a slot (2t + 1); the last version before a
need serves it.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from memplan.planning.packing import live_nbytes
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.planning.search.tape import Over, Tape

AWAY_NBYTES = 1 << 44
"""What a value counts in the slot in which it must not be on the device: more than all memory, so that every plan that
keeps a limit keeps the pins.
"""

Recomputation = tuple[int, int]
"""An operation, and the slot in whose prelude it runs."""


@dataclass(frozen=True, slots=True)
class Offload:
    """A value that is on the host for a while."""

    value: int
    start: int | None  # the slot after which its copy to the host begins; None: an earlier offload left it there
    end: int  # the last slot in which it is still on the device
    prefetch: int  # the slot after which its copy back begins, for the next slot that needs it


class Ledger:
    """A plan on a tape; `recompute` and `offload` change it, and can be undone."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.preludes: list[list[int]] = [[] for _ in range(tape.count)]  # operations of each slot, ascending
        self.offloads: dict[tuple[int, int], Offload] = {}  # by (value, slot after which the prefetch begins)
        self.on_host: dict[int, int] = {}  # value -> the slot after which its first copy to the host is there
        self.host_nbytes = 0  # of these values
        self._made: list[list[int]] = [[2 * value.first_slot + 1] for value in tape.values]
        self._wanted: list[dict[int, int]] = [{} for _ in tape.nbytes]  # slot -> number of its needs
        self._own: list[dict[int, int]] = [{} for _ in tape.nbytes]  # the same, until the end of its own work
        for slot, work in enumerate(tape.slots):
            for value in work.reads:
                self._wanted[value][slot] = self._own[value][slot] = 1
        self.needs: list[list[int]] = [sorted(wanted) for wanted in self._wanted]  # slots by value, ascending
        change = np.zeros(tape.count + 1, np.int64)
        for value in range(len(tape.nbytes)):
            for first, end in self._through(value):
                change[first] += tape.nbytes[value]
                change[end] -= tape.nbytes[value]
        self.through = np.cumsum(change)[:-1]  # by slot: bytes that are live throughout
        for value in self.unmoved():
            self.through[tape.values[value].away] += AWAY_NBYTES
        self._beside = np.zeros(tape.count, np.int64)  # by slot: peak above `through`
        self._load: np.ndarray | None = None
        self._dirty = set(range(tape.count))  # slots whose peak is to be counted again when it is asked for
        self.slack = np.zeros(tape.count, np.int64)  # by slot: the layout's bytes that the values do not account for
        self.slot_seconds = np.array([slot.seconds for slot in tape.slots])  # preludes included

    @property
    def load(self) -> np.ndarray:
        """Peak bytes of each slot."""
        if self._load is None:
            for slot in self._dirty:
                self._recount(slot)
            self._dirty.clear()
            self._load = self.through + self._beside + self.slack
        return self._load

    def set_slack(self, nbytes: np.ndarray) -> None:
        self.slack, self._load = nbytes, None

    @property
    def peak_nbytes(self) -> int:
        return int(self.load.max())

    def restore(self, recomputations: Iterable[Recomputation], offloads: Iterable[Offload] = ()) -> None:
        """Change the plan to these recomputations and offloads."""
        recomputed, on_host = set(recomputations), set(offloads)
        for offload in [offload for offload in self.offloads.values() if offload not in on_host]:
            self.undo_offload(offload)
        for op, slot in set(self.recomputations()) - recomputed:
            self.undo_recompute(op, slot)
        for op, slot in recomputed - set(self.recomputations()):
            self.recompute(op, slot)
        for offload in on_host - set(self.offloads.values()):
            self.offload(offload)

    def recomputations(self) -> list[Recomputation]:
        """Ordered by slot."""
        return [(op, slot) for slot, ops in enumerate(self.preludes) for op in ops]

    def version(self, value: int, slot: int) -> tuple[int, int]:
        """When the version that serves a need in a slot is made, and the last slot that needs that version."""
        made, needs = self._made[value], self.needs[value]
        at = bisect_right(made, 2 * slot) - 1
        below = len(needs) if at + 1 == len(made) else bisect_left(needs, (made[at + 1] + 1) >> 1)
        last = needs[below - 1] if below else -1
        return made[at], max(last, made[at] >> 1)

    def last_touch(self, value: int, slot: int) -> int:
        """The last earlier slot in which a value is made or needed."""
        made, needs = self._made[value], self.needs[value]
        at = bisect_left(needs, slot)
        return max(made[bisect_left(made, 2 * slot) - 1] >> 1, needs[at - 1] if at else -1)

    def reader(self, offload: Offload) -> int | None:
        """The slot that waits for the prefetch: the next that needs the value; None if a later version serves it."""
        needs, made = self.needs[offload.value], self._made[offload.value]
        at = bisect_right(needs, offload.prefetch)
        if at == len(needs) or made[bisect_right(made, 2 * needs[at]) - 1] != 2 * offload.prefetch + 1:
            return None
        return needs[at]

    def read_by_own_work(self, value: int, slot: int) -> bool:
        """Does a slot's own work read a value, which is then live until its end?"""
        return slot in self._own[value]

    def _versions(self, value: int) -> list[tuple[int, int]]:
        """The moment at which each version is made, and the last slot that needs it; -1 if none does."""
        made, needs = self._made[value], self.needs[value]
        found, at = [], 0
        for number, moment in enumerate(made):
            end = len(needs) if number + 1 == len(made) else bisect_left(needs, (made[number + 1] + 1) >> 1, at)
            found.append((moment, needs[end - 1] if end > at else -1))
            at = end
        return found

    def _through(self, value: int) -> list[tuple[int, int]]:
        """Spans [first, end) of slots throughout which a version is live."""
        own = self._own[value]
        spans = (((moment >> 1) + 1, last + (last in own)) for moment, last in self._versions(value))
        return [(first, end) for first, end in spans if first < end]

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
                insort(self._made[value], 2 * slot)
            else:
                self._made[value].remove(2 * slot)
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

    def is_needed(self, op: int, slot: int, limit: int) -> bool:
        """Is there surely more than the limit if this recomputation is undone?

        A result would be live since it was last made or needed; at most all operands would be free meanwhile.
        """
        operation, nbytes = self.tape.operations[op], self.tape.nbytes
        freed = sum(nbytes[value] for value in operation.reads)
        for value in operation.writes:
            made, needs = self._made[value], self.needs[value]
            at, later = bisect_left(needs, slot), bisect_right(made, 2 * slot)
            is_read = at < len(needs) and (later == len(made) or needs[at] < (made[later] + 1) >> 1)
            between = self.load[self.last_touch(value, slot) + 1 : slot]
            if is_read and between.size and between.max() + nbytes[value] - freed > limit:
                return True
        return False

    def offload(self, offload: Offload) -> None:
        self._offload(offload, +1)
        self.offloads[offload.value, offload.prefetch] = offload

    def undo_offload(self, offload: Offload) -> None:
        del self.offloads[offload.value, offload.prefetch]
        self._offload(offload, -1)

    def _offload(self, offload: Offload, sign: int) -> None:
        before = self._before_change(offload.value)
        if sign > 0:
            insort(self._made[offload.value], 2 * offload.prefetch + 1)
        else:
            self._made[offload.value].remove(2 * offload.prefetch + 1)
        if offload.start is not None:
            self.host_nbytes += sign * self.tape.nbytes[offload.value]
            if sign > 0:
                self.on_host[offload.value] = offload.end
            else:
                del self.on_host[offload.value]
            self._need(offload.value, offload.end, sign)
            own = self._own[offload.value]
            own[offload.end] = own.get(offload.end, 0) + sign
            if not own[offload.end]:
                del own[offload.end]
        self._after_change(offload.value, before)

    def _need(self, value: int, slot: int, sign: int) -> None:
        wanted = self._wanted[value]
        count = wanted.get(slot, 0) + sign
        if count == sign == 1:
            insort(self.needs[value], slot)
        if count:
            wanted[slot] = count
        else:
            del wanted[slot]
            self.needs[value].remove(slot)

    def _before_change(self, value: int) -> list[tuple[int, int]]:
        """Spans in which a value is live throughout; slots that a change of it may affect become dirty."""
        self._touch(value)
        return self._through(value)

    def _after_change(self, value: int, before: list[tuple[int, int]]) -> None:
        after, nbytes = self._through(value), self.tape.nbytes[value]
        self._load = None
        for first, end in before:
            if (first, end) not in after:
                self.through[first:end] -= nbytes
        for first, end in after:
            if (first, end) not in before:
                self.through[first:end] += nbytes
        self._weigh(value, before, -1)
        self._weigh(value, after, +1)
        self._touch(value)

    def unmoved(self) -> list[int]:
        """Values that are live in the slot in which they must be away."""
        pinned = (value for value, one in enumerate(self.tape.values) if one.away is not None)
        return [value for value in pinned if self._is_unmoved(value, self._through(value))]

    def _is_unmoved(self, value: int, spans: Iterable[tuple[int, int]]) -> bool:
        away = self.tape.values[value].away
        return away is not None and any(first <= away < end for first, end in spans)

    def _weigh(self, value: int, spans: Iterable[tuple[int, int]], sign: int) -> None:
        """Count a value in the slot in which it must be away, if it is live there."""
        if self._is_unmoved(value, spans):
            self.through[self.tape.values[value].away] += sign * AWAY_NBYTES

    def _touch(self, value: int) -> None:
        for moment, last in self._versions(value):
            if not moment & 1:
                self._dirty.add(moment >> 1)
            if last >= 0 and (self.preludes[last] or self.tape.slots[last].may_alias):
                self._dirty.add(last)

    def _recount(self, slot: int) -> None:
        """Recompute the peak of a slot above the bytes that are live throughout."""
        tape, ops, work = self.tape, self.preludes[slot], self.tape.slots[slot]
        beside = work.nbytes - self._written_over(work.may_alias, slot)
        beside += sum(tape.nbytes[value] for value in work.writes)
        if not ops:
            self._beside[slot] = beside
            return
        operations = [tape.operations[op] for op in ops]
        last_read = {value: number for number, op in enumerate(operations) for value in op.reads}
        change = [0] * (len(ops) + 2)
        made: set[int] = set()
        for number, op in enumerate(operations):
            for value in op.writes:
                made.add(value)
                nbytes, (_, last) = tape.nbytes[value], self.version(value, slot)
                if last > slot or slot in self._own[value]:
                    beside += nbytes
                    change[number] += nbytes
                else:
                    change[number] += nbytes
                    change[last_read.get(value, number) + 1] -= nbytes
        for value, number in last_read.items():
            if value not in made:
                _, last = self.version(value, slot)
                if last == slot and slot not in self._own[value]:
                    change[0] += tape.nbytes[value]
                    change[number + 1] -= tape.nbytes[value]
        most = here = 0
        for number, op in enumerate(operations):
            here += change[number]
            sources = {source for _, given in op.may_alias for source in given}
            read_later = {it for it in sources if last_read[it] > number or slot in self._own[it]}
            most = max(most, here - self._written_over(op.may_alias, slot, read_later))
        self._beside[slot] = max(beside, most)

    def _written_over(self, over: Over, slot: int, read_later: Collection[int] = ()) -> int:
        """Bytes of results that overwrite operands at their last read in the slot, except prefetched operands.

        Args:
          read_later: values that later work in the same slot reads.
        """
        saved, taken = 0, set[int]()
        for value, sources in over:
            for source in sources:
                moment, last = self.version(source, slot)
                # a prefetch makes an element of a tuple, which nothing overwrites
                fetched = moment & 1 and moment != 2 * self.tape.values[source].first_slot + 1
                if last <= slot and source not in read_later and source not in taken and not fetched:
                    taken.add(source)
                    saved += self.tape.nbytes[value]
                    break
        return saved


def reconcile(problem: Problem, tape: Tape) -> Tape:
    """The tape with each slot's `nbytes` set to the layout's bytes that the values do not account for."""
    rest = live_nbytes(problem, runs(tape.order)) - Ledger(tape).load
    return replace(
        tape, slots=tuple(replace(slot, nbytes=int(more)) for slot, more in zip(tape.slots, rest, strict=True))
    )
