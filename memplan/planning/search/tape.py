"""A step as the search sees it: slots in a row, each with its own work, and what may be recomputed before it.

A *tape* is a problem in one order of its kernels, written down as slots. A *slot* does its own work once, a kernel or
nothing. Before it, in its *prelude*, operations are recomputed in the order of their numbers, each at most once: the
stages of Checkmate (Jain et al., MLSys 2020). A value is live from where a version of it is made to the last need
before the next version is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from memplan.planning.legal import has_own_place, must_run_once, pair_ends
from memplan.planning.problem import Problem, Role

Over = tuple[tuple[int, tuple[int, ...]], ...]
"""Values that are written, and those that each may be written over."""

_NOWHERE = -2  # level of a prelude in which nothing may run


@dataclass(frozen=True)
class Tape:
    """Values, operations and slots, each by number."""

    nbytes: tuple[int, ...]  # of each value
    maker: tuple[int, ...]  # of each value, the operation that recomputes it
    home: tuple[int, ...]  # of each value, the slot that makes it first
    # of each value, the slot behind which it can be offloaded: of an asynchronous pair, the one that ends it
    whole: tuple[int, ...]
    # reads, writes: of each operation, values
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    seconds: tuple[float | None, ...]  # of each operation; None where it may not be recomputed
    until: tuple[int, ...]  # of each operation, the last slot before which it may be recomputed
    drops_dead_outputs: tuple[bool, ...]  # of each operation, whether it leaves out results that nobody reads
    over: tuple[Over, ...]  # of each operation, values that it writes and those that each may write over
    level: tuple[int, ...]  # of each operation, the loop that it stands in, -1 outside of loops
    # slot_reads, slot_writes: of each slot's own work
    slot_reads: tuple[tuple[int, ...], ...]
    slot_writes: tuple[tuple[int, ...], ...]
    slot_over: tuple[Over, ...]  # likewise, of each slot's own work
    slot_nbytes: tuple[int, ...]  # of each slot, bytes besides the values, during its own work
    slot_seconds: tuple[float, ...]  # of its own work
    slot_level: tuple[int, ...]  # the loop whose operations may run in its prelude

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self.slot_seconds)

    @cached_property
    def least_nbytes(self) -> np.ndarray:
        """Of each slot, what its own work takes: no plan goes below it."""
        found = []
        for slot, rest in enumerate(self.slot_nbytes):
            there = {*self.slot_reads[slot], *self.slot_writes[slot]}
            shared = sum(self.nbytes[value] for value, _ in self.slot_over[slot])
            found.append(rest + sum(self.nbytes[value] for value in there) - shared)
        return np.array(found, np.int64)

    def may_recompute(self, operation: int, slot: int) -> bool:
        """May an operation be recomputed before a slot?"""
        return (
            self.seconds[operation] is not None
            and slot <= self.until[operation]
            and self.level[operation] == self.slot_level[slot]
        )


@dataclass(frozen=True)
class Recording:
    """A problem in one order of its kernels, and the tape of it."""

    problem: Problem
    order: tuple[int, ...]  # number of the kernel of each operation
    values: tuple[int, ...]  # number of the buffer of each value
    tape: Tape
    # of each slot, the operation that is its own work; none in slots that stand between two kernels
    work: tuple[tuple[int, ...], ...]

    def with_empty_slots(self, slots: Collection[int]) -> Recording:
        """With an empty slot before each of these, in which something may be recomputed or be on the host."""
        old = self.tape
        later, passed = [], 0
        for slot in range(old.count + 1):
            passed += slot in slots
            later.append(slot + passed)

        def spread[T](rows: Sequence[T], empty: T | None) -> tuple[T, ...]:
            found: list[T] = []
            for slot, row in enumerate(rows):
                if slot in slots:
                    found.append(row if empty is None else empty)
                found.append(row)
            return tuple(found)

        tape = replace(
            old,
            home=tuple(later[slot] for slot in old.home),
            whole=tuple(later[slot] for slot in old.whole),
            until=tuple(later[slot] for slot in old.until),
            slot_reads=spread(old.slot_reads, ()),
            slot_writes=spread(old.slot_writes, ()),
            slot_over=spread(old.slot_over, ()),
            slot_nbytes=spread(old.slot_nbytes, 0),
            slot_seconds=spread(old.slot_seconds, 0.0),
            slot_level=spread(old.slot_level, None),
        )
        return replace(self, tape=tape, work=spread(self.work, ()))


def record(problem: Problem, order: Sequence[int] | None = None) -> Recording:
    """Every kernel a slot and an operation; every temporary with a place of its own a value."""
    order = tuple(range(len(problem.kernels)) if order is None else order)
    return _Recorder(problem, order).recording()


class _Recorder:
    def __init__(self, problem: Problem, order: tuple[int, ...]) -> None:
        self._problem, self._order = problem, order
        self._slot = {number: slot for slot, number in enumerate(order)}
        values = [
            buffer
            for number in order
            for buffer in problem.kernels[number].writes
            if problem.buffers[buffer].role is Role.TEMPORARY
            and problem.buffers[buffer].nbytes
            and has_own_place(problem, buffer)
        ]
        self._values = tuple(values)
        self._value = {buffer: value for value, buffer in enumerate(values)}
        self._read = problem.returned.union(*(kernel.reads for kernel in problem.kernels))
        self._first: dict[int, int] = {}  # of each loop: its first slot
        for slot, number in enumerate(order):
            for loop in problem.loops_around(number):
                self._first.setdefault(loop, slot)

    def recording(self) -> Recording:
        problem, kernels = self._problem, [self._problem.kernels[number] for number in self._order]
        reads = tuple(self._known(kernel.reads) for kernel in kernels)
        writes = tuple(self._known(kernel.writes) for kernel in kernels)
        times = [problem.times[number] for number in self._order]
        took = [kernel.seconds * count for kernel, count in zip(kernels, times, strict=True)]
        recompute_s = tuple(
            None if problem.kernels[number].fixed or must_run_once(problem, number) else seconds
            for number, seconds in zip(self._order, took, strict=True)
        )
        home = tuple(slot for slot, made in enumerate(writes) for _ in made)
        level = tuple(-1 if kernel.within is None else kernel.within for kernel in kernels)
        over = tuple(map(self._over, self._order))
        tape = Tape(
            nbytes=tuple(problem.buffers[buffer].nbytes for buffer in self._values),
            maker=home,
            home=home,
            whole=self._whole(home),
            reads=reads,
            writes=writes,
            seconds=recompute_s,
            until=tuple(map(self._until, self._order)),
            drops_dead_outputs=tuple(kernel.drops_dead_outputs and len(kernel.writes) > 1 for kernel in kernels),
            over=over,
            level=level,
            slot_reads=self._slot_reads(),
            slot_writes=writes,
            slot_over=over,
            slot_nbytes=(0,) * len(kernels),
            slot_seconds=tuple(took),
            slot_level=self._slot_level(level),
        )
        return Recording(problem, self._order, self._values, tape, tuple((slot,) for slot in range(len(kernels))))

    def _whole(self, home: Sequence[int]) -> tuple[int, ...]:
        ended = {
            self._value[buffer]: number for buffer, number in pair_ends(self._problem).items() if buffer in self._value
        }
        return tuple(self._slot[ended[value]] if value in ended else slot for value, slot in enumerate(home))

    def _known(self, buffers: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(self._value[buffer] for buffer in buffers if buffer in self._value))

    def _over(self, number: int) -> Over:
        kernel = self._problem.kernels[number]
        found = []
        for buffer in kernel.writes:
            nbytes = self._problem.buffers[buffer].nbytes
            sources = [source for source in kernel.over.get(buffer, ()) if not self._alone(source)]
            sources += [source for source in kernel.over_elements.get(buffer, ()) if self._alone(source)]
            fitting = [source for source in sources if self._problem.buffers[source].nbytes == nbytes]
            if buffer in self._value and (known := self._known(fitting)):
                found.append((self._value[buffer], known))
        return tuple(found)

    def _alone(self, buffer: int) -> bool:
        """Is it the only result of a kernel with several that anybody reads?"""
        maker = self._problem.buffers[buffer].maker
        if maker is None or not self._problem.kernels[maker].drops_dead_outputs:
            return False
        writes = self._problem.kernels[maker].writes
        return len(writes) > 1 and len(self._read.intersection(writes)) == 1

    def _slot_reads(self) -> tuple[tuple[int, ...], ...]:
        """What a loop reads from outside is there from its first slot to its last."""
        problem, found = self._problem, defaultdict[int, set[int]](set)
        for slot, number in enumerate(self._order):
            loops = [number, *problem.loops_around(number)]
            for buffer in problem.kernels[number].reads:
                if buffer not in self._value:
                    continue
                maker = problem.buffers[buffer].maker
                assert maker is not None
                # the innermost block that holds both: what a call or a branch makes may be read behind it
                blocks = [problem.kernels[one].within for one in (maker, *problem.loops_around(maker))]
                outside = next(block for block in blocks if block is None or block in loops[1:])
                reader = next(loop for loop in loops if problem.kernels[loop].within == outside)
                for at in {self._first.get(reader, slot), self._slot[reader]}:
                    found[at].add(self._value[buffer])
        return tuple(tuple(sorted(found[slot])) for slot in range(len(self._order)))

    def _slot_level(self, level: Sequence[int]) -> tuple[int, ...]:
        found = [
            _NOWHERE if self._problem.kernels[number].fixed else one
            for number, one in zip(self._order, level, strict=True)
        ]
        for loop in self._first:
            found[self._slot[loop]] = _NOWHERE
        for loop, slot in sorted(self._first.items(), key=lambda item: self._slot[item[0]]):
            around = self._problem.kernels[loop].within
            found[slot] = -1 if around is None else around
        return tuple(found)

    def _until(self, number: int) -> int:
        """The last slot before which a kernel may be recomputed: then something is written over what it reads."""
        problem, last = self._problem, len(self._order)
        for read in problem.kernels[number].reads:
            maker = problem.buffers[read].maker
            since = -1 if maker is None else self._slot[maker]
            for other in problem.places[problem.buffers[read].place]:
                taker = problem.buffers[other].maker
                if other != read and taker is not None and self._slot[taker] > since:
                    loops = [loop for loop in problem.loops_around(taker) if loop in self._first]
                    last = min(last, self._slot[taker], *(self._first[loop] for loop in loops))
        return last
