"""A step for the search: slots in order, and operations that may be recomputed before each.

A *tape* is a problem in one order of its kernels, as slots. A *slot* does its own work once: a
kernel or nothing. Before it, in its *prelude*, operations are recomputed in the order of their
numbers, each at most once: the stages of Checkmate (Jain et al., MLSys 2020). A value is live from
each version of it to the last need before the next version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from memplan.planning.legal import is_unaliased, must_run_once, pair_ends
from memplan.planning.problem import Kernel, Problem, Role, Where

Aliases = tuple[tuple[int, tuple[int, ...]], ...]
"""Written values, and for each the values that it may overwrite."""

ENTRY = -1
"""Block of operations and slots that are in no block."""

_NO_BLOCK = -2  # block of a slot before which no operation may run


@dataclass(frozen=True, slots=True)
class TapeValue:
    """A temporary that aliases no other buffer."""

    nbytes: int
    maker: int  # the operation that recomputes it
    first_slot: int  # the slot that makes it
    # it may be offloaded after this slot; for an asynchronous pair, the slot that ends the pair
    ready_slot: int
    buffer: int = -1  # number in the problem
    # slots of the starts and ends of asynchronous pairs that read it throughout
    pair_spans: tuple[tuple[int, int], ...] = ()
    times: int = 1  # how often it is made in a step, in the loops around it
    may_offload: bool = True
    absent_slot: int | None = None  # the slot in which its pin forbids it on the device

    def is_read_by_pair(self, slot: int) -> bool:
        """Does an asynchronous pair read it before a slot, so that it is live anyway?"""
        return any(start < slot <= end for start, end in self.pair_spans)


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel that may be recomputed in a prelude."""

    # reads, writes: values
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float | None  # None: it may not be recomputed
    last_recompute_slot: int
    may_alias: Aliases = ()
    block: int = ENTRY  # the block that contains it
    kernel: int = -1  # number in the problem
    # it may be recomputed after this slot; for an asynchronous pair, the slot that ends the pair
    ready_slot: int = -1


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot's own work, if any, and the block whose operations may run in its prelude."""

    block: int = ENTRY
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    may_alias: Aliases = ()
    nbytes: int = 0  # during the work, in addition to the values
    seconds: float = 0.0
    operation: int | None = None  # its work


@dataclass(frozen=True)
class Tape:
    """Values, operations and slots, each by number."""

    values: tuple[TapeValue, ...]
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
    def floor_nbytes(self) -> np.ndarray:
        """Bytes of each slot's own work: a lower bound of every plan in this order."""
        floors = []
        for slot in self.slots:
            touched_nbytes = sum(self.nbytes[value] for value in {*slot.reads, *slot.writes})
            aliased_nbytes = sum(self.nbytes[value] for value, _ in slot.may_alias)
            floors.append(slot.nbytes + touched_nbytes - aliased_nbytes)
        return np.array(floors, np.int64)

    def may_recompute(self, number: int, slot: int) -> bool:
        """May an operation be recomputed before a slot?"""
        operation = self.operations[number]
        if operation.seconds is None or operation.block != self.slots[slot].block:
            return False
        if any(self.values[value].is_read_by_pair(slot) for value in operation.writes):
            return False
        return operation.ready_slot < slot <= operation.last_recompute_slot

    def with_empty_slots(self, before: Collection[int]) -> Tape:
        """The tape with an empty slot before each of these.

        In an empty slot values may be recomputed or be on the host.
        """
        slots = list[Slot]()
        shifted = list[int]()  # by slot: its number in the new tape
        for number, slot in enumerate(self.slots):
            if number in before:
                slots.append(Slot(slot.block))
            shifted.append(len(slots))
            slots.append(slot)
        shifted.append(len(slots))
        values = (
            replace(
                value,
                first_slot=shifted[value.first_slot],
                ready_slot=shifted[value.ready_slot],
                pair_spans=tuple((shifted[start], shifted[end]) for start, end in value.pair_spans),
                absent_slot=None if value.absent_slot is None else shifted[value.absent_slot],
            )
            for value in self.values
        )
        operations = (
            replace(
                operation,
                ready_slot=shifted[operation.ready_slot],
                last_recompute_slot=shifted[operation.last_recompute_slot],
            )
            for operation in self.operations
        )
        return Tape(tuple(values), tuple(operations), tuple(slots))


def record(problem: Problem, order: Sequence[int] | None = None) -> Tape:
    """A tape of kernels in an order; None: the problem's own.

    Every kernel is a slot and an operation, every temporary that aliases no other buffer a value.
    """
    return _Recorder(problem, range(len(problem.kernels)) if order is None else order).tape()


def with_absent_slots(problem: Problem, tape: Tape) -> Tape:
    """Chooses the slot at which each value pinned off the device must be absent.

    It is halfway through the longest time between two needs of the value.
    """
    if not problem.moves_pinned:
        return tape
    ends = np.cumsum([slot.seconds for slot in tape.slots])
    needs = defaultdict[int, list[int]](list)
    for number, slot in enumerate(tape.slots):
        for value in slot.reads:
            needs[value].append(number)

    def absent_slot(number: int, value: TapeValue) -> int | None:
        touches = [value.first_slot, *needs[number]]
        is_pinned = problem.is_pinned(value.buffer, Where.HOST, Where.RECOMPUTE)
        if not is_pinned or len(touches) < 2:
            return None
        first, last = max(pairwise(touches), key=lambda gap: ends[gap[1] - 1] - ends[gap[0]])
        block = tape.operations[value.maker].block
        middle_s = (ends[first] + ends[last - 1]) / 2
        slots = [slot for slot in range(first + 1, last) if tape.slots[slot].block == block]
        return min(slots, key=lambda slot: abs(float(ends[slot]) - middle_s), default=None)

    values = []
    for number, value in enumerate(tape.values):
        values.append(replace(value, absent_slot=absent_slot(number, value)))
    return replace(tape, values=tuple(values))


class _Recorder:
    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self._problem = problem
        self._order = order
        self._slot = {number: slot for slot, number in enumerate(order)}
        self._buffers = list(self._recorded_buffers())  # by value
        self._value = {buffer: value for value, buffer in enumerate(self._buffers)}
        self._first_slot: dict[int, int] = {}  # by block
        for slot, number in enumerate(order):
            for block in problem.blocks_around(number):
                self._first_slot.setdefault(block, slot)

    def _recorded_buffers(self) -> Iterator[int]:
        for number in self._order:
            for buffer in self._problem.kernels[number].writes:
                is_temporary = self._problem.buffers[buffer].role is Role.TEMPORARY
                nbytes = self._problem.buffers[buffer].nbytes
                if is_temporary and nbytes and is_unaliased(self._problem, buffer):
                    yield buffer

    def tape(self) -> Tape:
        problem = self._problem
        ends = pair_ends(problem)
        pair_spans = self._pair_spans(ends)
        reads = self._slot_reads()
        blocks = self._slot_blocks()
        operations = list[Operation]()
        slots = list[Slot]()
        values = list[TapeValue]()
        for slot, number in enumerate(self._order):
            kernel = problem.kernels[number]
            seconds = kernel.seconds * problem.times[number]
            is_recomputable = not must_run_once(problem, number) and not self._is_stored(kernel)
            writes = self._values_of(kernel.writes)
            may_alias = self._aliases(kernel)
            ready = self._slot[ends.get(number, number)]
            operations.append(
                Operation(
                    self._values_of(kernel.reads),
                    writes,
                    seconds if is_recomputable else None,
                    self._last_recompute_slot(number),
                    may_alias,
                    ENTRY if kernel.block is None else kernel.block,
                    number,
                    ready,
                )
            )
            slots.append(Slot(blocks[slot], reads[slot], writes, may_alias, 0, seconds, slot))
            for buffer in map(self._buffers.__getitem__, writes):
                nbytes = problem.buffers[buffer].nbytes
                spans = tuple(pair_spans[buffer])
                times = problem.times[number]
                may_offload = not problem.is_pinned(buffer, Where.DEVICE, Where.RECOMPUTE)
                value = TapeValue(nbytes, slot, slot, ready, buffer, spans, times, may_offload)
                values.append(value)
        return Tape(tuple(values), tuple(operations), tuple(slots))

    def _is_stored(self, kernel: Kernel) -> bool:
        """Is a result pinned to a memory? Then all results of the kernel are made once."""
        memories = (Where.DEVICE, Where.HOST)
        return any(self._problem.is_pinned(buffer, *memories) for buffer in kernel.writes)

    def _pair_spans(self, ends: Mapping[int, int]) -> Mapping[int, list[tuple[int, int]]]:
        """Buffer -> slots of the starts and ends of the asynchronous pairs that read it."""
        spans = defaultdict[int, list[tuple[int, int]]](list)
        for start, end in ends.items():
            for buffer in self._problem.kernels[start].reads:
                spans[buffer].append((self._slot[start], self._slot[end]))
        return spans

    def _values_of(self, buffers: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(self._value[buffer] for buffer in buffers if buffer in self._value))

    def _aliases(self, kernel: Kernel) -> Aliases:
        buffers = self._problem.buffers
        aliases = []
        for written in kernel.writes:
            sources = [
                source
                for source in kernel.may_alias.get(written, ())
                if buffers[source].nbytes == buffers[written].nbytes
            ]
            if written in self._value and (values := self._values_of(sources)):
                aliases.append((self._value[written], values))
        return tuple(aliases)

    def _slot_reads(self) -> list[tuple[int, ...]]:
        """Values that each slot reads.

        A block reads values from outside in its first and its last slot.
        """
        problem = self._problem
        kernels = problem.kernels
        reads = defaultdict[int, set[int]](set)
        for slot, number in enumerate(self._order):
            around = [number, *problem.blocks_around(number)]
            for buffer in kernels[number].reads:
                if buffer not in self._value:
                    continue
                maker = problem.buffers[buffer].maker
                assert maker is not None
                # the innermost block that contains maker and reader: a branch's or a call's results
                # may be read after it
                blocks = [kernels[n].block for n in (maker, *problem.blocks_around(maker))]
                common = next(block for block in blocks if block is None or block in around[1:])
                reader = next(unit for unit in around if kernels[unit].block == common)
                for read_slot in {self._first_slot.get(reader, slot), self._slot[reader]}:
                    reads[read_slot].add(self._value[buffer])
        return [tuple(sorted(reads[slot])) for slot in range(len(self._order))]

    def _slot_blocks(self) -> list[int]:
        """By slot: the block whose operations may run in its prelude.

        Nothing runs right before a block, whose body precedes it: operations of its own computation
        run before the first slot of the body instead.
        """
        kernels = self._problem.kernels
        blocks = list[int]()
        for number in self._order:
            block = kernels[number].block
            blocks.append(ENTRY if block is None else block)
        for block in self._first_slot:
            blocks[self._slot[block]] = _NO_BLOCK
        inner_first = sorted(self._first_slot.items(), key=lambda item: self._slot[item[0]])
        for block, slot in inner_first:
            around = kernels[block].block
            blocks[slot] = ENTRY if around is None else around
        return blocks

    def _last_recompute_slot(self, number: int) -> int:
        """The last slot before an operand of a kernel is overwritten.

        A block that overwrites one does so in its first slot. What overwrites one before the kernel
        runs for the first time is in another branch of a conditional.
        """
        problem = self._problem
        last = len(self._order)
        around = set(problem.blocks_around(number))
        for read in problem.kernels[number].reads:
            for alias in problem.alias_sets[problem.buffers[read].alias_set]:
                writer = problem.buffers[alias].maker
                if alias != read and writer is not None and self._slot[writer] > self._slot[number]:
                    entered = [b for b in problem.blocks_around(writer) if b not in around]
                    first_slots = (self._first_slot[block] for block in entered)
                    last = min(last, self._slot[writer], *first_slots)
        return last
