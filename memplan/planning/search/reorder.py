"""Reorders kernels at no cost: kernels that free memory run early, kernels that fill it late.

Forward, a kernel that frees at least the bytes that it makes runs as early as it can: gradients of
weights and their updates. Then backward, with the roles exchanged: a kernel that makes more than it
keeps live runs right before its first reader. A kernel that only advances a loop's counter runs
last, since kernels that read the counter may run again until then. A block and its body move as
one; a body's kernels move within it.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from memplan.planning.precedence import by_block, precedence
from memplan.planning.problem import Buffer, Kernel, Problem, Role

_FEW = 8  # a value with more remaining readers than this is not about to be freed


def reorder(problem: Problem) -> tuple[int, ...]:
    """Numbers of the kernels in an order that mostly needs less memory."""
    nbytes = [  # by buffer; 0 for those that no order frees
        buffer.nbytes if buffer.role is Role.TEMPORARY and not _is_state(problem, buffer) else 0
        for buffer in problem.buffers
    ]
    order = _reordered(problem, nbytes, range(len(problem.kernels)), forward=True)
    return _reordered(problem, nbytes, order, forward=False)


def _reordered(
    problem: Problem, nbytes: Sequence[int], order: Sequence[int], forward: bool
) -> tuple[int, ...]:
    units_of, contents = by_block(problem, order)
    before = precedence(problem, order)

    def within(block: int | None) -> Iterator[int]:
        """The kernels inside a block, bodies before their blocks."""
        for unit in _UnitOrder(problem, nbytes, units_of[block], contents, before).run(forward):
            if unit in units_of:
                yield from within(unit)
            yield unit

    return tuple(within(None))


class _UnitOrder:
    """Orders the units of one computation."""

    def __init__(
        self,
        problem: Problem,
        nbytes: Sequence[int],  # by buffer; 0 for those that no order frees
        units: Sequence[int],
        contents: Mapping[int, Sequence[int]],
        before: Mapping[int, set[int]],
    ) -> None:
        self._units = units
        self._before = before
        self._after: dict[int, set[int]] = {unit: set() for unit in units}
        for unit in units:
            for predecessor in before[unit]:
                self._after[predecessor].add(unit)
        self._nbytes = nbytes
        self._reads: dict[int, set[int]] = {}
        self._writes: dict[int, set[int]] = {}
        self._late = set[int]()  # units that only overwrite
        self._readers: dict[int, set[int]] = defaultdict(set)
        for unit in units:
            kernels = [problem.kernels[number] for number in (*contents.get(unit, ()), unit)]
            writes = {written for kernel in kernels for written in kernel.writes}
            reads = {read for kernel in kernels for read in kernel.reads}
            self._writes[unit] = {written for written in writes if self._nbytes[written]}
            self._reads[unit] = {read for read in reads if self._nbytes[read]} - writes
            if len(kernels) == 1 and _only_overwrites(problem, kernels[0]):
                self._late.add(unit)
            for read in self._reads[unit]:
                self._readers[read].add(unit)

    def run(self, forward: bool) -> list[int]:
        """The units in order, except that units of a low `net` run as early as they can."""
        units = self._units if forward else self._units[::-1]
        before = self._before
        after = self._after
        if not forward:
            before, after = after, before
        max_net = 0 if forward else -1

        position = {unit: number for number, unit in enumerate(units)}
        pending = {unit: len(before[unit]) for unit in units}  # predecessors that have not run
        unread_by = {value: set(readers) for value, readers in self._readers.items()}
        done: set[int] = set()
        order: list[int] = []
        for next_unit in units:
            ready: list[tuple[float, int, int]] = []
            if next_unit not in done:
                ready.append((0, position[next_unit], next_unit))
            while ready:
                _, _, unit = heapq.heappop(ready)
                if unit in done:
                    continue
                if unit != next_unit and self._net(unit, forward, unread_by) > max_net:
                    continue
                done.add(unit)
                order.append(unit)
                changed = set()
                for read in self._reads[unit]:
                    unread_by[read].discard(unit)
                    changed.update(unread_by[read] if len(unread_by[read]) <= _FEW else ())
                for successor in after[unit]:
                    pending[successor] -= 1
                    changed.add(successor)
                for candidate in changed - done:
                    if pending[candidate]:
                        continue
                    net = self._net(candidate, forward, unread_by)
                    if net <= max_net:
                        heapq.heappush(ready, (net, position[candidate], candidate))
        return order if forward else order[::-1]

    def _net(self, unit: int, forward: bool, unread_by: Mapping[int, set[int]]) -> float:
        """Bytes that a unit makes less those it reads last.

        Backward, bytes that it needs first less those it makes.

        Args:
          unread_by: value -> its readers that have not run.
        """
        if unit in self._late:
            return 1 if forward else -math.inf
        made_nbytes = sum(self._nbytes[written] for written in self._writes[unit])
        reads = self._reads[unit]
        if forward:
            last = (read for read in reads if unread_by[read] == {unit})
            return made_nbytes - sum(self._nbytes[read] for read in last)
        first = (read for read in reads if unread_by[read] == self._readers[read])
        return sum(self._nbytes[read] for read in first) - made_nbytes


def _is_state(problem: Problem, buffer: Buffer) -> bool:
    """Does a buffer alias one from outside of its computation, such as a carried value?

    It takes no bytes of its own.
    """
    first = problem.buffers[buffer.alias_set]
    if first.maker is None:
        return True
    block = None if buffer.maker is None else problem.kernels[buffer.maker].block
    return problem.kernels[first.maker].block != block


def _only_overwrites(problem: Problem, kernel: Kernel) -> bool:
    """Does a kernel only write in place, and keep no temporary alive but those?"""
    alias_sets = {
        problem.buffers[written].alias_set
        for written in kernel.writes
        if len(problem.alias_sets[problem.buffers[written].alias_set]) > 1
    }
    if not len(alias_sets) == len(kernel.writes) > 0:
        return False
    for read in kernel.reads:
        buffer = problem.buffers[read]
        if buffer.role is Role.TEMPORARY and buffer.alias_set not in alias_sets:
            return False
    return True
