"""A lower bound on the bytes of every plan in any order: those of the most demanding kernel."""

from collections.abc import Iterable

from memplan.planning.problem import Kernel, Problem, Role


def floor(problem: Problem) -> tuple[int, int | None]:
    """Lower bound on any plan's bytes of temporaries, and the kernel that sets it.

    The kernel is None if the problem has none.
    """
    if not problem.kernels:
        return problem.tables_nbytes, None
    bound = _Bound(problem)
    nbytes, kernel = max((bound.nbytes(number), -number) for number in range(len(problem.kernels)))
    return nbytes + problem.tables_nbytes, -kernel


class _Bound:
    """Bytes of a kernel's operands and results, less those that may alias.

    They may alias each other, an argument or an output. Alias sets are counted, not buffers.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        buffers = problem.buffers
        self._sizes = {
            alias_set: max(buffers[number].nbytes for number in members)
            for alias_set, members in problem.alias_sets.items()
        }
        callers = self._alias_sets((*problem.donated, *problem.outputs))
        # donated arguments and outputs, the largest alias_set
        self._callers = sorted(callers, key=lambda alias_set: (-self._sizes[alias_set], alias_set))
        temporary = {
            alias_set
            for alias_set, members in problem.alias_sets.items()
            if all(buffers[number].role is Role.TEMPORARY for number in members)
        }
        self._in_heap = temporary - callers
        # by block: alias sets that it carries, or that its body reads from outside
        self._through: dict[int, set[int]] = {}
        for block in {kernel.block for kernel in problem.kernels if kernel.block is not None}:
            numbers = range(len(problem.kernels))
            inside = {number for number in numbers if block in problem.blocks_around(number)}
            reads = {read for number in inside for read in problem.kernels[number].reads}
            outside = (read for read in reads if buffers[read].maker not in inside)
            self._through[block] = self._alias_sets((*problem.kernels[block].reads, *outside))

    def nbytes(self, number: int) -> int:
        """Lower bound on the bytes of the heap while a kernel runs."""
        kernel = self._problem.kernels[number]
        sources_of = {written: self._sources(kernel, written) for written in kernel.writes}
        unaliased = (written for written, sources in sources_of.items() if not sources)
        live = self._alias_sets((*kernel.reads, *unaliased))
        for block in self._problem.blocks_around(number):
            live |= self._through[block]
        aliased = {written for written, sources in sources_of.items() if sources}
        separate = {*kernel.reads, *kernel.writes} - aliased.union(*sources_of.values())
        occupied = self._alias_sets(separate)
        # the largest buffers take the largest free arguments and outputs, the others the heap
        free_sets = (alias_set for alias_set in self._callers if alias_set not in occupied)
        free = map(self._sizes.__getitem__, free_sets)
        free_nbytes = next(free, 0)
        heap_nbytes = 0
        in_heap = map(self._sizes.__getitem__, live & self._in_heap)
        for nbytes in sorted(in_heap, reverse=True):
            if nbytes <= free_nbytes:
                free_nbytes = next(free, 0)
            else:
                heap_nbytes += nbytes
        return heap_nbytes

    def _sources(self, kernel: Kernel, written: int) -> list[int]:
        """Operands that a result may alias; an element of a tuple only in the caller's memory."""
        sources = list(kernel.may_alias.get(written, ()))
        largest_nbytes = self._sizes[self._callers[0]] if self._callers else -1
        for source in kernel.may_alias_elements.get(written, ()):
            if self._problem.buffers[source].nbytes <= largest_nbytes:
                sources.append(source)
        return sources

    def _alias_sets(self, buffers: Iterable[int]) -> set[int]:
        return {self._problem.buffers[number].alias_set for number in buffers}
