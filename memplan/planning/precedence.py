"""What has to stay in front of what, whoever changes the order of a problem's kernels.

What makes a buffer is in front of its readers, and what writes it over in place behind them; what runs once does so in
its order. Where an asynchronous pair is under way, nothing crosses its start or its end, so that what it overlaps
stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from memplan.planning.problem import Problem


def precedence(problem: Problem, order: Sequence[int] | None = None) -> Mapping[int, set[int]]:
    """Of every kernel, and of every loop as a whole, those beside it that have to stay in front of it.

    Args:
      order: of the kernels; the problem's own for None.
    """
    return _Precedence(problem, range(len(problem.kernels)) if order is None else order).run()


class _Precedence:
    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self._problem = problem
        self._inside: dict[int | None, list[int]] = defaultdict(list)
        self._contents: dict[int, list[int]] = defaultdict(list)
        for number in order:
            self._inside[problem.kernels[number].within].append(number)
            for loop in problem.loops_around(number):
                self._contents[loop].append(number)
        self._pairs = self._asynchronous()

    def run(self) -> Mapping[int, set[int]]:
        levels = (self._level(units, loop) for loop, units in self._inside.items())
        return {unit: before for level in levels for unit, before in level.items()}

    def _asynchronous(self) -> set[int]:
        """Starts and ends of pairs: what writes nothing ends what made its operands."""
        kernels, found = self._problem.kernels, set[int]()
        for number, kernel in enumerate(kernels):
            if not kernel.recomputable and not kernel.writes and kernel.reads:
                makers = (self._problem.buffers[read].maker for read in kernel.reads)
                found.update(m for m in makers if m is not None and not kernels[m].recomputable)
                found.add(number)
        return found

    def _level(self, units: Sequence[int], loop: int | None) -> dict[int, set[int]]:
        """Of every unit, those that stay in front of it."""
        problem, contents = self._problem, self._contents
        before: dict[int, set[int]] = {unit: set() for unit in units}
        maker_of: dict[int, int] = {}
        touched: dict[int, set[int]] = defaultdict(set)  # of each shared place, since it was written last
        writer: dict[int, int] = {}
        once = fence = None
        passed: list[int] = []
        for unit in units:
            own = before[unit]
            kernels = [problem.kernels[number] for number in (*contents.get(unit, ()), unit)]
            reads = {read for kernel in kernels for read in kernel.reads}
            writes = {written for kernel in kernels for written in kernel.writes}
            own.update(maker_of[read] for read in reads if read in maker_of)
            for buffer in reads | writes:
                place = problem.buffers[buffer].place
                if len(problem.places[place]) > 1:
                    own.update({writer[place]} if place in writer else ())
                    own.update(touched[place] if buffer in writes else ())
            for buffer in reads | writes:
                place = problem.buffers[buffer].place
                touched[place].add(unit)
                if buffer in writes:
                    maker_of[buffer] = writer[place] = unit
            if any(not kernel.recomputable for kernel in kernels):
                own.update(() if once is None else (once,))
                once = unit
            if fence is not None:
                own.add(fence)
            if unit in self._pairs or (loop is not None and not problem.kernels[unit].recomputable):
                own.update(passed)
                fence, passed = unit, []
            passed.append(unit)
            own.discard(unit)
        return before
