"""Which kernels must precede which, in any order of a problem's kernels.

A kernel that writes a buffer precedes its readers, and one that overwrites it in place follows them; kernels that run
once keep their order. Nothing crosses the start or the end of an asynchronous pair: it overlaps with the same kernels
as before, unless pairs are to be moved.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from memplan.planning.legal import pair_ends
from memplan.planning.problem import Kernel, Problem


def precedence(
    problem: Problem, order: Sequence[int] | None = None, free: Collection[int] | None = None
) -> Mapping[int, set[int]]:
    """Kernel, or block as a whole -> those of the same computation that must precede it.

    Args:
      order: of the kernels; None: the problem's own.
      free: kernels that may run once, but at any time; kernels may then cross the starts and ends of pairs.
    """
    kernels = problem.kernels
    inside, contents = by_block(problem, range(len(kernels)) if order is None else order)
    ends = pair_ends(problem)
    pairs = {*ends, *ends.values()} if free is None else set[int]()
    found = dict[int, set[int]]()
    for block, units in inside.items():
        fences = pairs.union(unit for unit in units if block is not None and _is_fence(kernels[unit]))
        found |= _within(problem, units, contents, fences, free or ())
    return found


def _is_fence(kernel: Kernel) -> bool:
    """Does it begin or end a computation, or call one? What a call only passes on is read by the call's name."""
    return kernel.is_boundary or not (kernel.recomputable or kernel.writes or kernel.started_by is not None)


def by_block(
    problem: Problem, order: Sequence[int]
) -> tuple[Mapping[int | None, Sequence[int]], Mapping[int, Sequence[int]]]:
    """Block -> the kernels of its body, None -> those of the entry; and block -> all kernels inside it. In order."""
    inside, contents = defaultdict[int | None, list[int]](list), defaultdict[int, list[int]](list)
    for number in order:
        inside[problem.kernels[number].block].append(number)
        for block in problem.blocks_around(number):
            contents[block].append(number)
    return inside, contents


def _within(
    problem: Problem,
    units: Sequence[int],
    contents: Mapping[int, Sequence[int]],
    fences: Collection[int],
    free: Collection[int],
) -> Mapping[int, set[int]]:
    """Unit of a computation -> those that must precede it; nothing crosses a fence."""
    before: dict[int, set[int]] = {unit: set() for unit in units}
    maker_of: dict[int, int] = {}
    ended: dict[int, int] = {}  # result of an asynchronous pair -> its end
    touched: dict[int, set[int]] = defaultdict(set)  # by place: units that used it so far
    writer: dict[int, int] = {}
    once = fence = None
    passed: list[int] = []
    for unit in units:
        own = before[unit]
        kernels = [problem.kernels[number] for number in (*contents.get(unit, ()), unit)]
        reads = {read for kernel in kernels for read in kernel.reads}
        writes = {written for kernel in kernels for written in kernel.writes}
        own.update(maker_of[read] for read in reads if read in maker_of)
        own.update(ended[read] for read in reads if read in ended)
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
        start = problem.kernels[unit].started_by
        ended.update(dict.fromkeys(() if start is None else problem.kernels[start].writes, unit))
        if unit not in free and any(not kernel.recomputable for kernel in kernels):
            own.update(() if once is None else (once,))
            once = unit
        if fence is not None:
            own.add(fence)
        if unit in fences:
            own.update(passed)
            fence, passed = unit, []
        passed.append(unit)
        own.discard(unit)
    return before
