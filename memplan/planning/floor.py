"""A lower bound on the bytes of every plan, in any order: those that the most demanding kernel needs by itself."""

from collections.abc import Iterable

from memplan.planning.problem import Kernel, Problem, Role


def floor(problem: Problem) -> tuple[int, int | None]:
    """Lower bound on any plan's bytes of temporaries, and the number of the kernel that sets it; None if none runs."""
    if not problem.kernels:
        return problem.tables_nbytes, None
    bound = _Bound(problem)
    nbytes, kernel = max((bound.nbytes(number), -number) for number in range(len(problem.kernels)))
    return nbytes + problem.tables_nbytes, -kernel


class _Bound:
    """Bytes of a kernel's operands and results, except those that may alias each other, an argument or an output."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        buffers, places = problem.buffers, problem.places
        self._sizes = {place: max(buffers[one].nbytes for one in there) for place, there in places.items()}
        given = self._places((*problem.donated, *problem.outputs))
        self._given = sorted(given, key=lambda place: (-self._sizes[place], place))
        temporary = {p for p, there in places.items() if all(buffers[one].role is Role.TEMPORARY for one in there)}
        self._in_heap = temporary - given
        self._through: dict[int, set[int]] = {}  # by block: places that it carries, or that its body reads from outside
        for block in {kernel.block for kernel in problem.kernels if kernel.block is not None}:
            inside = {number for number in range(len(problem.kernels)) if block in problem.blocks_around(number)}
            reads = {one for number in inside for one in problem.kernels[number].reads}
            outside = (one for one in reads if buffers[one].maker not in inside)
            self._through[block] = self._places((*problem.kernels[block].reads, *outside))

    def nbytes(self, number: int) -> int:
        """Least bytes of the heap while a kernel runs."""
        kernel = self._problem.kernels[number]
        over = {written: self._sources(kernel, written) for written in kernel.writes}
        there = self._places((*kernel.reads, *(written for written, sources in over.items() if not sources)))
        for block in self._problem.blocks_around(number):
            there |= self._through[block]
        covering = {written for written, sources in over.items() if sources}
        taken = self._places({*kernel.reads, *kernel.writes} - covering.union(*over.values()))
        free = iter([self._sizes[place] for place in self._given if place not in taken])
        room, needed = next(free, 0), 0
        for nbytes in sorted((self._sizes[place] for place in there & self._in_heap), reverse=True):
            if nbytes <= room:
                room = next(free, 0)
            else:
                needed += nbytes
        return needed

    def _sources(self, kernel: Kernel, written: int) -> list[int]:
        """Operands that a result may alias; a tuple's element only in a given place."""
        problem, found = self._problem, list(kernel.may_alias.get(written, ()))
        for source in kernel.may_alias_elements.get(written, ()):
            if self._given and problem.buffers[source].nbytes <= self._sizes[self._given[0]]:
                found.append(source)
        return found

    def _places(self, buffers: Iterable[int]) -> set[int]:
        return {self._problem.buffers[one].place for one in buffers}
