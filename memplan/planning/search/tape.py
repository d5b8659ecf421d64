"""A step for the search: slots in order, each with its own work, and operations that may be recomputed before it.

A *tape* is a problem in one order of its kernels, as slots. A *slot* does its own work once: a kernel or nothing.
Before it, in its *prelude*, operations are recomputed in the order of their numbers, each at most once: the stages of
Checkmate (Jain et al., MLSys 2020). A value is live from each version of it to the last need before the next version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from memplan.planning.legal import has_own_place, must_run_once, pair_ends
from memplan.planning.problem import Kernel, Problem, Role, Where

Over = tuple[tuple[int, tuple[int, ...]], ...]
"""Written values, and for each those that it may overwrite."""

_NOWHERE = -2  # level of a prelude in which nothing may run


@dataclass(frozen=True, slots=True)
class Value:
    """A temporary with a place of its own."""

    nbytes: int
    maker: int  # the operation that recomputes it
    first_slot: int  # the slot that makes it
    ready_slot: int  # it can be offloaded after this slot; for an asynchronous pair, the slot that ends it
    buffer: int = -1  # number in the problem
    held: tuple[tuple[int, int], ...] = ()  # slots of the starts and ends of asynchronous pairs that read it throughout
    times: int = 1  # how often it is made in a step, in the loops around it
    may_leave: bool = True  # for the host
    away: int | None = None  # the slot in which it must not be on the device, as its pin asks

    def is_held(self, slot: int) -> bool:
        """Is it there before a slot anyway, since an asynchronous pair reads it?"""
        return any(start < slot <= end for start, end in self.held)


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel that may be recomputed in a prelude."""

    # reads, writes: values
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float | None  # None: it may not be recomputed
    last_recompute_slot: int
    may_alias: Over = ()
    level: int = -1  # the block that contains it, or -1
    kernel: int = -1  # number in the problem
    ready_slot: int = -1  # it may be recomputed after this slot; for an asynchronous pair, the slot that ends it


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot's own work, if any, and the block whose operations may run in its prelude."""

    level: int = -1
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    may_alias: Over = ()
    nbytes: int = 0  # during the work, in addition to the values
    seconds: float = 0.0
    operation: int | None = None  # its work


@dataclass(frozen=True)
class Tape:
    """Values, operations and slots, each by number."""

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    slots: tuple[Slot, ...]

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self.slots)

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes by value."""
        return tuple(value.nbytes for value in self.values)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(operation.kernel for operation in self.operations)

    @cached_property
    def least_nbytes(self) -> np.ndarray:
        """Bytes of each slot's own work: a lower bound of every plan in this order."""
        found = []
        for slot in self.slots:
            there = {*slot.reads, *slot.writes}
            shared = sum(self.nbytes[value] for value, _ in slot.may_alias)
            found.append(slot.nbytes + sum(self.nbytes[value] for value in there) - shared)
        return np.array(found, np.int64)

    def may_recompute(self, operation: int, slot: int) -> bool:
        """May an operation be recomputed before a slot?"""
        one = self.operations[operation]
        in_time = one.ready_slot < slot <= one.last_recompute_slot
        held = any(self.values[value].is_held(slot) for value in one.writes)
        return one.seconds is not None and in_time and not held and one.level == self.slots[slot].level

    def with_empty_slots(self, before: Collection[int]) -> Tape:
        """The tape with an empty slot before each of these, in which values may be recomputed or be on the host."""
        slots, later = list[Slot](), list[int]()
        for number, slot in enumerate(self.slots):
            if number in before:
                slots.append(Slot(slot.level))
            later.append(len(slots))
            slots.append(slot)
        later.append(len(slots))
        values = (
            replace(
                one,
                first_slot=later[one.first_slot],
                ready_slot=later[one.ready_slot],
                held=tuple((later[start], later[end]) for start, end in one.held),
                away=None if one.away is None else later[one.away],
            )
            for one in self.values
        )
        operations = (
            replace(one, ready_slot=later[one.ready_slot], last_recompute_slot=later[one.last_recompute_slot])
            for one in self.operations
        )
        return Tape(tuple(values), tuple(operations), tuple(slots))


def record(problem: Problem, order: Sequence[int] | None = None) -> Tape:
    """Make every kernel a slot and an operation, and every temporary with a place of its own a value."""
    return _Recorder(problem, range(len(problem.kernels)) if order is None else order).tape()


def with_away(problem: Problem, tape: Tape) -> Tape:
    """The tape with the slot in which each value that is pinned off the device must not be there.

    It is halfway through the longest time between two needs of the value.
    """
    if not problem.moves_pinned:
        return tape
    ends, needs = np.cumsum([slot.seconds for slot in tape.slots]), defaultdict[int, list[int]](list)
    for number, slot in enumerate(tape.slots):
        for value in slot.reads:
            needs[value].append(number)

    def away(number: int, value: Value) -> int | None:
        touched = [value.first_slot, *needs[number]]
        if not problem.is_pinned(value.buffer, Where.HOST, Where.RECOMPUTE) or len(touched) < 2:
            return None
        first, last = max(pairwise(touched), key=lambda gap: ends[gap[1] - 1] - ends[gap[0]])
        level, middle = tape.operations[value.maker].level, (ends[first] + ends[last - 1]) / 2
        between = [slot for slot in range(first + 1, last) if tape.slots[slot].level == level]
        return min(between, key=lambda slot: abs(float(ends[slot]) - middle), default=None)

    values = (replace(one, away=away(number, one)) for number, one in enumerate(tape.values))
    return replace(tape, values=tuple(values))


class _Recorder:
    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self._problem, self._order = problem, order
        self._slot = {number: slot for slot, number in enumerate(order)}
        self._buffers = [
            buffer
            for number in order
            for buffer in problem.kernels[number].writes
            if problem.buffers[buffer].role is Role.TEMPORARY
            and problem.buffers[buffer].nbytes
            and has_own_place(problem, buffer)
        ]
        self._value = {buffer: value for value, buffer in enumerate(self._buffers)}
        self._first: dict[int, int] = {}  # by block: its first slot
        for slot, number in enumerate(order):
            for block in problem.blocks_around(number):
                self._first.setdefault(block, slot)

    def tape(self) -> Tape:
        problem, ends = self._problem, pair_ends(self._problem)
        operations, slots, values = list[Operation](), list[Slot](), list[Value]()
        reads, levels, held = self._slot_reads(), self._slot_levels(), self._held(ends)
        for slot, number in enumerate(self._order):
            kernel = problem.kernels[number]
            took = kernel.seconds * problem.times[number]
            writes, may_alias = self._known(kernel.writes), self._over(kernel)
            ready = self._slot[ends.get(number, number)]
            operations.append(
                Operation(
                    self._known(kernel.reads),
                    writes,
                    None if must_run_once(problem, number) or self._is_kept(kernel) else took,
                    self._last_recompute_slot(number),
                    may_alias,
                    -1 if kernel.block is None else kernel.block,
                    number,
                    ready,
                )
            )
            slots.append(Slot(levels[slot], reads[slot], writes, may_alias, 0, took, slot))
            for value in writes:
                buffer = self._buffers[value]
                nbytes, times = problem.buffers[buffer].nbytes, problem.times[number]
                may_leave = not problem.is_pinned(buffer, Where.DEVICE, Where.RECOMPUTE)
                values.append(Value(nbytes, slot, slot, ready, buffer, tuple(held[buffer]), times, may_leave))
        return Tape(tuple(values), tuple(operations), tuple(slots))

    def _is_kept(self, kernel: Kernel) -> bool:
        """Is a result pinned to a memory? What a kernel makes together is made once."""
        return any(self._problem.is_pinned(buffer, Where.DEVICE, Where.HOST) for buffer in kernel.writes)

    def _held(self, ends: Mapping[int, int]) -> Mapping[int, list[tuple[int, int]]]:
        """Buffer -> slots of the starts and ends of the asynchronous pairs that read it."""
        found = defaultdict[int, list[tuple[int, int]]](list)
        for start, end in ends.items():
            for buffer in self._problem.kernels[start].reads:
                found[buffer].append((self._slot[start], self._slot[end]))
        return found

    def _known(self, buffers: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(self._value[buffer] for buffer in buffers if buffer in self._value))

    def _over(self, kernel: Kernel) -> Over:
        found = []
        for buffer in kernel.writes:
            nbytes = self._problem.buffers[buffer].nbytes
            sources = kernel.may_alias.get(buffer, ())
            fitting = [source for source in sources if self._problem.buffers[source].nbytes == nbytes]
            if buffer in self._value and (known := self._known(fitting)):
                found.append((self._value[buffer], known))
        return tuple(found)

    def _slot_reads(self) -> list[tuple[int, ...]]:
        """Values that each slot reads; a block reads those from outside in its first and its last slot."""
        problem, found = self._problem, defaultdict[int, set[int]](set)
        for slot, number in enumerate(self._order):
            around = [number, *problem.blocks_around(number)]
            for buffer in problem.kernels[number].reads:
                if buffer not in self._value:
                    continue
                maker = problem.buffers[buffer].maker
                assert maker is not None
                # the innermost block that contains both: results of a call or a branch may be read after it
                blocks = [problem.kernels[one].block for one in (maker, *problem.blocks_around(maker))]
                outside = next(block for block in blocks if block is None or block in around[1:])
                reader = next(one for one in around if problem.kernels[one].block == outside)
                for at in {self._first.get(reader, slot), self._slot[reader]}:
                    found[at].add(self._value[buffer])
        return [tuple(sorted(found[slot])) for slot in range(len(self._order))]

    def _slot_levels(self) -> list[int]:
        kernels, found = self._problem.kernels, list[int]()
        for number in self._order:
            block = kernels[number].block
            found.append(-1 if block is None else block)
        for block in self._first:
            found[self._slot[block]] = _NOWHERE
        for block, slot in sorted(self._first.items(), key=lambda item: self._slot[item[0]]):
            around = kernels[block].block
            found[slot] = -1 if around is None else around
        return found

    def _last_recompute_slot(self, number: int) -> int:
        """The last slot before one of a kernel's operands is overwritten, or a block begins that does so."""
        problem, last = self._problem, len(self._order)
        around = set(problem.blocks_around(number))
        for read in problem.kernels[number].reads:
            maker = problem.buffers[read].maker
            since = -1 if maker is None else self._slot[maker]
            for other in problem.places[problem.buffers[read].place]:
                taker = problem.buffers[other].maker
                if other != read and taker is not None and self._slot[taker] > since:
                    begun = [block for block in problem.blocks_around(taker) if block not in around]
                    last = min(last, self._slot[taker], *(self._first[block] for block in begun))
        return last
