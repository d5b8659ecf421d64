"""The bytes of a plan, slot by slot, kept up to date while repetitions and copies come and go.

Moments count in halves of slots: 2t is the prelude of slot t, 2t + 1 the end of its own work. A value is made at home
(2t + 1), again in a prelude (2t), or by a copy that begins behind a slot (2t + 1); each need is served by the last
making before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from memplan.planning.search.tape import Over, Tape


@dataclass(frozen=True, slots=True)
class Copy:
    """A value that is on the host for a while.

    Attributes:
      out: the slot behind which it leaves; None where an earlier copy of it is there already.
      gone: the last slot during which it is still on the device.
      back: the slot behind which it begins to come back, for the next one that needs it.
    """

    value: int
    out: int | None
    gone: int
    back: int


class Ledger:
    """A plan on a tape, changed by `add` and `remove`, `move` and `unmove`.

    Attributes:
      again: of each slot, the operations in its prelude, ascending.
      copies: by value.
      needs: of each value, the slots that need it, ascending.
      load: of each slot, its bytes at the most.
      through: of each slot, bytes that are there all the time.
      slot_seconds: of each slot, its prelude included.
      extra: of each slot, bytes that were seen to be there and that the values do not account for.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.again: list[list[int]] = [[] for _ in range(tape.count)]
        self.copies: dict[tuple[int, int], Copy] = {}  # by value, and where it begins to come back
        self._made: list[list[int]] = [[2 * home + 1] for home in tape.home]
        self._wanted: list[dict[int, int]] = [{} for _ in tape.nbytes]  # slots -> how many need it there
        self._own: list[dict[int, int]] = [{} for _ in tape.nbytes]  # likewise, until the end of the slot's own work
        for slot, read in enumerate(tape.slot_reads):
            for value in read:
                self._wanted[value][slot] = self._own[value][slot] = 1
        self.needs: list[list[int]] = [sorted(wanted) for wanted in self._wanted]
        change = np.zeros(tape.count + 1, np.int64)
        for value in range(len(tape.nbytes)):
            for first, end in self._through(value):
                change[first] += tape.nbytes[value]
                change[end] -= tape.nbytes[value]
        self.through = np.cumsum(change)[:-1]
        self._beside = np.zeros(tape.count, np.int64)  # above `through`, at the most
        self._load: np.ndarray | None = None
        self._extra = np.zeros(tape.count, np.int64)
        self.slot_seconds = np.array(tape.slot_seconds)
        for slot in range(tape.count):
            self._settle(slot)

    @property
    def load(self) -> np.ndarray:
        if self._load is None:
            self._load = self.through + self._beside + self._extra
        return self._load

    @property
    def extra(self) -> np.ndarray:
        return self._extra

    @extra.setter
    def extra(self, nbytes: np.ndarray) -> None:
        self._extra, self._load = nbytes, None

    @property
    def peak_nbytes(self) -> int:
        return int(self.load.max())

    def become(self, pairs: Iterable[tuple[int, int]], copies: Iterable[Copy] = ()) -> None:
        """Have these repetitions and copies, and no others."""
        wanted, moved = set(pairs), set(copies)
        for copy in [copy for copy in self.copies.values() if copy not in moved]:
            self.unmove(copy)
        for op, slot in set(self.pairs()) - wanted:
            self.remove(op, slot)
        for op, slot in wanted - set(self.pairs()):
            self.add(op, slot)
        for copy in moved - set(self.copies.values()):
            self.move(copy)

    def pairs(self) -> list[tuple[int, int]]:
        """Operations and the slots before which they run again."""
        return [(op, slot) for slot, ops in enumerate(self.again) for op in ops]

    def served(self, value: int, slot: int) -> tuple[int, int]:
        """The making that serves a need in a slot, or would, and the last slot that needs it until the next one."""
        made, needs = self._made[value], self.needs[value]
        at = bisect_right(made, 2 * slot) - 1
        below = len(needs) if at + 1 == len(made) else bisect_left(needs, (made[at + 1] + 1) >> 1)
        last = needs[below - 1] if below else -1
        return made[at], max(last, made[at] >> 1)

    def before(self, value: int, slot: int) -> int:
        """The last slot before this one in which a value is made or needed."""
        made, needs = self._made[value], self.needs[value]
        at = bisect_left(needs, slot)
        return max(made[bisect_left(made, 2 * slot) - 1] >> 1, needs[at - 1] if at else -1)

    def use(self, copy: Copy) -> int | None:
        """The slot that waits for what comes back: the first that needs the value, if it is not made once more."""
        needs, made = self.needs[copy.value], self._made[copy.value]
        at = bisect_right(needs, copy.back)
        if at == len(needs) or made[bisect_right(made, 2 * needs[at]) - 1] != 2 * copy.back + 1:
            return None
        return needs[at]

    def is_own(self, value: int, slot: int) -> bool:
        """Is a value there until the end of a slot's own work, being read by it?"""
        return slot in self._own[value]

    def _versions(self, value: int) -> list[tuple[int, int]]:
        """Makings, and the last slot that needs each; -1 where none does."""
        made, needs = self._made[value], self.needs[value]
        found, at = [], 0
        for number, moment in enumerate(made):
            end = len(needs) if number + 1 == len(made) else bisect_left(needs, (made[number + 1] + 1) >> 1, at)
            found.append((moment, needs[end - 1] if end > at else -1))
            at = end
        return found

    def _through(self, value: int) -> list[tuple[int, int]]:
        """Slots during all of which a version is there."""
        own = self._own[value]
        spans = (((moment >> 1) + 1, last + (last in own)) for moment, last in self._versions(value))
        return [(first, end) for first, end in spans if first < end]

    def add(self, op: int, slot: int) -> None:
        """An operation runs again before a slot."""
        self._repeat(op, slot, +1)

    def remove(self, op: int, slot: int) -> None:
        """It does not."""
        self._repeat(op, slot, -1)

    def _repeat(self, op: int, slot: int, sign: int) -> None:
        tape, dirty = self.tape, {slot}
        for value in tape.writes[op]:
            before = self._lift(value, dirty)
            if sign > 0:
                insort(self._made[value], 2 * slot)
            else:
                self._made[value].remove(2 * slot)
            self._drop(value, before, dirty)
        for value in tape.reads[op]:
            before = self._lift(value, dirty)
            self._need(value, slot, sign)
            self._drop(value, before, dirty)
        self.slot_seconds[slot] += sign * (tape.seconds[op] or 0.0)
        if sign > 0:
            insort(self.again[slot], op)
        else:
            self.again[slot].remove(op)
        for one in dirty:
            self._settle(one)

    def move(self, copy: Copy) -> None:
        """A value is on the host for a while."""
        self._moved(copy, +1)
        self.copies[copy.value, copy.back] = copy

    def unmove(self, copy: Copy) -> None:
        """It is not."""
        del self.copies[copy.value, copy.back]
        self._moved(copy, -1)

    def _moved(self, copy: Copy, sign: int) -> None:
        dirty: set[int] = set()
        before = self._lift(copy.value, dirty)
        if sign > 0:
            insort(self._made[copy.value], 2 * copy.back + 1)
        else:
            self._made[copy.value].remove(2 * copy.back + 1)
        if copy.out is not None:
            self._need(copy.value, copy.gone, sign)
            own = self._own[copy.value]
            own[copy.gone] = own.get(copy.gone, 0) + sign
            if not own[copy.gone]:
                del own[copy.gone]
        self._drop(copy.value, before, dirty)
        for one in dirty:
            self._settle(one)

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

    def _lift(self, value: int, dirty: set[int]) -> list[tuple[int, int]]:
        """Where a value was before a change; slots that the change may touch."""
        self._touch(value, dirty)
        return self._through(value)

    def _drop(self, value: int, before: list[tuple[int, int]], dirty: set[int]) -> None:
        after, nbytes = self._through(value), self.tape.nbytes[value]
        self._load = None
        for first, end in before:
            if (first, end) not in after:
                self.through[first:end] -= nbytes
        for first, end in after:
            if (first, end) not in before:
                self.through[first:end] += nbytes
        self._touch(value, dirty)

    def _touch(self, value: int, dirty: set[int]) -> None:
        for moment, last in self._versions(value):
            if not moment & 1:
                dirty.add(moment >> 1)
            if last >= 0 and (self.again[last] or self.tape.slot_over[last]):
                dirty.add(last)
        op = self.tape.maker[value]
        if op >= 0 and self.tape.sheds[op]:
            dirty.add(self.tape.home[value])

    def _settle(self, slot: int) -> None:
        """Bytes of a slot above what is there all the time."""
        self._load = None
        tape, ops = self.tape, self.again[slot]
        beside = tape.slot_nbytes[slot] + sum(map(self._written, tape.slot_writes[slot]))
        beside -= self._written_over(tape.slot_over[slot], slot)
        if not ops:
            self._beside[slot] = beside
            return
        last_read: dict[int, int] = {}
        for number, op in enumerate(ops):
            for value in tape.reads[op]:
                last_read[value] = number
        change = [0] * (len(ops) + 2)
        made: set[int] = set()
        for number, op in enumerate(ops):
            for value in tape.writes[op]:
                made.add(value)
                nbytes, (_, last) = tape.nbytes[value], self.served(value, slot)
                if last > slot or slot in self._own[value]:
                    beside += nbytes
                    change[number] += nbytes
                elif value in last_read or not tape.sheds[op]:
                    change[number] += nbytes
                    change[last_read.get(value, number) + 1] -= nbytes
        for value, number in last_read.items():
            if value not in made:
                _, last = self.served(value, slot)
                if last == slot and slot not in self._own[value]:
                    change[0] += tape.nbytes[value]
                    change[number + 1] -= tape.nbytes[value]
        most = here = 0
        for number, op in enumerate(ops):
            here += change[number]
            sources = {source for _, given in tape.over[op] for source in given}
            read_later = {it for it in sources if last_read[it] > number or slot in self._own[it]}
            most = max(most, here - self._written_over(tape.over[op], slot, read_later))
        self._beside[slot] = max(beside, most)

    def _written(self, value: int) -> int:
        """Bytes that a slot's own work makes of a value: none where nobody reads it and the operation leaves it out."""
        op = self.tape.maker[value]
        left_out = op >= 0 and self.tape.sheds[op] and self._versions(value)[0][1] < 0
        return 0 if left_out else self.tape.nbytes[value]

    def _written_over(self, over: Over, slot: int, read_later: Collection[int] = ()) -> int:
        """Bytes that work in the slot writes over what it reads for the last time, but not what came back.

        Args:
          read_later: values that later work in the same slot reads.
        """
        saved, taken = 0, set[int]()
        for value, sources in over:
            for source in sources:
                moment, last = self.served(source, slot)
                if (
                    last <= slot
                    and source not in read_later
                    and source not in taken
                    and not self._came_back(source, moment)
                ):
                    taken.add(source)
                    saved += self.tape.nbytes[value]
                    break
        return saved

    def _came_back(self, value: int, moment: int) -> bool:
        """Was it made by a copy? What comes back is an element of a tuple, which nothing writes over."""
        return bool(moment & 1) and moment != 2 * self.tape.home[value] + 1
