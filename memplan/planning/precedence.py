"""Which kernels must precede which, in any order of a problem's kernels.

A kernel that writes a buffer precedes its readers, and one that overwrites it in place follows
them. Kernels that run once keep their order. Nothing crosses the start or the end of an
asynchronous pair, so that it overlaps with the same kernels as before, unless pairs are to be
moved.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from memplan.planning.legal import pair_ends
from memplan.planning.problem import Kernel, Problem


def precedence(
    problem: Problem, order: Sequence[int] | None = None, free: Collection[int] | None = None
) -> Mapping[int, set[int]]:
    """Kernel, or block as a whole -> the units of its computation that must precede it.

    Args:
      order: of the kernels; None: the problem's own.
      free: kernels that run once, but at any time; kernels may then cross starts and ends of pairs.
    """
    kernels = problem.kernels
    units_of, contents = by_block(problem, range(len(kernels)) if order is None else order)
    ends = pair_ends(problem)
    pairs = {*ends, *ends.values()} if free is None else set[int]()
    predecessors = dict[int, set[int]]()
    for block, units in units_of.items():
        fences = set(pairs)
        if block is not None:
            fences.update(unit for unit in units if _is_fence(kernels[unit]))
        predecessors |= _predecessors(problem, units, contents, fences, free or ())
    return predecessors


def _is_fence(kernel: Kernel) -> bool:
    """Does a kernel begin or end a computation, or call one?

    Readers of what a call passes through name the call as its maker.
    """
    has_effect = not (kernel.recomputable or kernel.writes or kernel.started_by is not None)
    return kernel.is_boundary or has_effect


def by_block(
    problem: Problem, order: Sequence[int]
) -> tuple[Mapping[int | None, Sequence[int]], Mapping[int, Sequence[int]]]:
    """Units and contents of blocks, in order.

    Returns:
      Block -> the kernels directly in its body; None -> those of the entry.
      Block -> all kernels inside it, at any depth.
    """
    units = defaultdict[int | None, list[int]](list)
    contents = defaultdict[int, list[int]](list)
    for number in order:
        units[problem.kernels[number].block].append(number)
        for block in problem.blocks_around(number):
            contents[block].append(number)
    return units, contents


def _predecessors(
    problem: Problem,
    units: Sequence[int],
    contents: Mapping[int, Sequence[int]],
    fences: Collection[int],
    free: Collection[int],
) -> Mapping[int, set[int]]:
    """Unit of a computation -> the units that must precede it; nothing crosses a fence."""
    before: dict[int, set[int]] = {unit: set() for unit in units}
    maker_of: dict[int, int] = {}
    end_of: dict[int, int] = {}  # result of an asynchronous pair -> its end
    # by alias set: the units that used it so far, and the last that wrote it
    users: dict[int, set[int]] = defaultdict(set)
    writer: dict[int, int] = {}
    last_effect = fence = None
    since_fence: list[int] = []
    for unit in units:
        predecessors = before[unit]
        kernels = [problem.kernels[number] for number in (*contents.get(unit, ()), unit)]
        reads = {read for kernel in kernels for read in kernel.reads}
        writes = {written for kernel in kernels for written in kernel.writes}
        for sources in (maker_of, end_of):
            predecessors.update(sources[read] for read in reads if read in sources)
        for buffer in reads | writes:
            alias_set = problem.buffers[buffer].alias_set
            if len(problem.alias_sets[alias_set]) > 1:
                predecessors.update({writer[alias_set]} if alias_set in writer else ())
                predecessors.update(users[alias_set] if buffer in writes else ())
        for buffer in reads | writes:
            alias_set = problem.buffers[buffer].alias_set
            users[alias_set].add(unit)
            if buffer in writes:
                maker_of[buffer] = writer[alias_set] = unit
        start = problem.kernels[unit].started_by
        if start is not None:
            end_of.update(dict.fromkeys(problem.kernels[start].writes, unit))
        if unit not in free and any(not kernel.recomputable for kernel in kernels):
            predecessors.update(() if last_effect is None else (last_effect,))
            last_effect = unit
        if fence is not None:
            predecessors.add(fence)
        if unit in fences:
            predecessors.update(since_fence)
            fence = unit
            since_fence = []
        since_fence.append(unit)
        predecessors.discard(unit)
    return before
