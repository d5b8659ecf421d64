"""Reorders kernels at no cost: kernels that free memory run early, kernels that fill it late.

Forward, a kernel that frees at least what it makes runs as soon as it can: gradients of weights and their updates. Then
backward, with the roles exchanged: a kernel that makes more than it keeps live runs right before its first reader, and
one that only counts a loop's counter on runs last, as kernels that read the counter may run again until then. A block
and its body move as one; a body's kernels move within it.
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
    return _reordered(problem, _reordered(problem, range(len(problem.kernels)), forward=True), forward=False)


def _reordered(problem: Problem, order: Sequence[int], forward: bool) -> tuple[int, ...]:
    inside, contents = by_block(problem, order)
    before = precedence(problem, order)

    def within(block: int | None) -> Iterator[int]:
        """The kernels inside a block, bodies before their blocks."""
        units = inside[block]
        for unit in _Level(problem, units, contents, before).run(forward):
            if unit in inside:
                yield from within(unit)
            yield unit

    return tuple(within(None))


class _Level:
    """Orders one list of units."""

    def __init__(
        self,
        problem: Problem,
        units: Sequence[int],
        contents: Mapping[int, Sequence[int]],
        before: Mapping[int, set[int]],
    ) -> None:
        nbytes = [b.nbytes if b.role is Role.TEMPORARY and not _is_state(problem, b) else 0 for b in problem.buffers]
        self._units, self._before, self._nbytes = units, before, nbytes
        self._after: dict[int, set[int]] = {unit: set() for unit in units}
        for unit in units:
            for one in before[unit]:
                self._after[one].add(unit)
        inside = {unit: [problem.kernels[n] for n in (*contents.get(unit, ()), unit)] for unit in units}
        self._writes = {u: {w for k in kernels for w in k.writes if nbytes[w]} for u, kernels in inside.items()}
        self._reads = {
            u: {r for k in kernels for r in k.reads if nbytes[r]} - self._writes[u] for u, kernels in inside.items()
        }
        self._late = {u for u, (*others, kernel) in inside.items() if not others and _only_overwrites(problem, kernel)}
        self._readers: dict[int, set[int]] = defaultdict(set)
        for unit, reads in self._reads.items():
            for read in reads:
                self._readers[read].add(unit)

    def run(self, forward: bool) -> list[int]:
        """The given order, but units whose `net` is at most `most` run as soon as they can, the smallest first."""
        units = self._units if forward else self._units[::-1]
        before, after = (self._before, self._after) if forward else (self._after, self._before)
        most = 0 if forward else -1

        def net(unit: int) -> float:
            """Bytes that a unit makes less those it reads last; backward, those it needs first less those it makes."""
            if unit in self._late:
                return 1 if forward else -math.inf
            made = sum(self._nbytes[written] for written in self._writes[unit])
            if forward:
                return made - sum(self._nbytes[read] for read in self._reads[unit] if self._open[read] == {unit})
            needed = (read for read in self._reads[unit] if self._open[read] == self._readers[read])
            return sum(self._nbytes[read] for read in needed) - made

        place = {unit: number for number, unit in enumerate(units)}
        left = {unit: len(before[unit]) for unit in units}
        self._open = {value: set(readers) for value, readers in self._readers.items()}
        done: set[int] = set()
        found: list[int] = []
        for next_one in units:
            ready: list[tuple[float, int, int]] = [(0, place[next_one], next_one)] if next_one not in done else []
            while ready:
                _, _, unit = heapq.heappop(ready)
                if unit in done or (unit != next_one and net(unit) > most):
                    continue
                done.add(unit)
                found.append(unit)
                changed = set()
                for read in self._reads[unit]:
                    self._open[read].discard(unit)
                    changed.update(self._open[read] if len(self._open[read]) <= _FEW else ())
                for one in after[unit]:
                    left[one] -= 1
                    changed.add(one)
                for one in changed - done:
                    if not left[one] and net(one) <= most:
                        heapq.heappush(ready, (net(one), place[one], one))
        return found if forward else found[::-1]


def _is_state(problem: Problem, buffer: Buffer) -> bool:
    """Is it in the place of what is made outside of its computation, such as what a loop carries? It takes no more."""
    first = problem.buffers[buffer.place]
    made_in, of = (None if one.maker is None else problem.kernels[one.maker].block for one in (first, buffer))
    return first.maker is None or made_in != of


def _only_overwrites(problem: Problem, kernel: Kernel) -> bool:
    """Does a kernel write in place, and keep nothing else alive that is not there anyway?"""
    places = {
        problem.buffers[written].place
        for written in kernel.writes
        if len(problem.places[problem.buffers[written].place]) > 1
    }
    others = (problem.buffers[read] for read in kernel.reads if problem.buffers[read].place not in places)
    return len(places) == len(kernel.writes) > 0 and all(one.role is not Role.TEMPORARY for one in others)
