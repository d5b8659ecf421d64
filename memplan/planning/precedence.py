"""Which kernels must precede which, in any order of a problem's kernels.

A kernel that writes a buffer precedes its readers, and one that overwrites it in place follows
them. Kernels that run once keep their order. Nothing crosses the start or the end of an
asynchronous pair, so that it overlaps with the same kernels as before, unless pairs are to be
moved.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

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
    alias_set_of = {  # by buffer that aliases another
        buffer: alias_set
        for alias_set, members in problem.alias_sets.items()
        if len(members) > 1
        for buffer in members
    }
    predecessors = dict[int, set[int]]()
    for block, numbers in units_of.items():
        units = [_unit(problem, number, contents, free or ()) for number in numbers]
        fences = set(pairs)
        if block is not None:
            fences.update(number for number in numbers if _is_fence(kernels[number]))
        predecessors |= _predecessors(problem, units, alias_set_of, fences)
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


class _Unit(NamedTuple):
    """A kernel, or a block as a whole."""

    number: int  # of the kernel
    reads: Set[int]  # buffers, also those that kernels inside it read
    writes: Set[int]
    runs_once: bool  # in order with the others that do; not if it is free


def _unit(
    problem: Problem, number: int, contents: Mapping[int, Sequence[int]], free: Collection[int]
) -> _Unit:
    kernels = [problem.kernels[inside] for inside in (*contents.get(number, ()), number)]
    return _Unit(
        number,
        reads={read for kernel in kernels for read in kernel.reads},
        writes={written for kernel in kernels for written in kernel.writes},
        runs_once=number not in free and any(not kernel.recomputable for kernel in kernels),
    )


_Precedence = Iterator[tuple[int, Iterable[int]]]
"""Units of a computation, each with units that must precede it."""


def _predecessors(
    problem: Problem,
    units: Sequence[_Unit],
    alias_set_of: Mapping[int, int],
    fences: Collection[int],
) -> Mapping[int, set[int]]:
    """Unit of a computation -> the units that must precede it; nothing crosses a fence."""
    before: dict[int, set[int]] = {unit.number: set() for unit in units}
    for rule in (
        _makers_first(problem, units),
        _overwriters_last(units, alias_set_of),
        _run_once_in_order(units),
        _around_fences(units, fences),
    ):
        for unit, predecessors in rule:
            before[unit].update(predecessors)
    for unit, predecessors in before.items():
        predecessors.discard(unit)
    return before


def _makers_first(problem: Problem, units: Sequence[_Unit]) -> _Precedence:
    """Readers of a buffer follow the unit that makes it, and the end of its asynchronous pair."""
    maker_of: dict[int, int] = {}
    end_of: dict[int, int] = {}  # result of an asynchronous pair -> its end
    for unit in units:
        yield unit.number, [maker_of[read] for read in unit.reads if read in maker_of]
        yield unit.number, [end_of[read] for read in unit.reads if read in end_of]
        maker_of.update(dict.fromkeys(unit.writes, unit.number))
        start = problem.kernels[unit.number].started_by
        if start is not None:
            end_of.update(dict.fromkeys(problem.kernels[start].writes, unit.number))


def _overwriters_last(units: Sequence[_Unit], alias_set_of: Mapping[int, int]) -> _Precedence:
    """Writers of an alias set follow its users so far, and its readers the last writer."""
    users: dict[int, set[int]] = defaultdict(set)  # by alias set
    writer: dict[int, int] = {}  # the last, by alias set
    for unit in units:
        aliases = [buffer for buffer in unit.reads | unit.writes if buffer in alias_set_of]
        for buffer in aliases:
            alias_set = alias_set_of[buffer]
            if alias_set in writer:
                yield unit.number, {writer[alias_set]}
            if buffer in unit.writes:
                yield unit.number, users[alias_set]
        for buffer in aliases:
            alias_set = alias_set_of[buffer]
            users[alias_set].add(unit.number)
            if buffer in unit.writes:
                writer[alias_set] = unit.number


def _run_once_in_order(units: Sequence[_Unit]) -> _Precedence:
    """Units that run once keep their order."""
    for earlier, later in pairwise(unit.number for unit in units if unit.runs_once):
        yield later, (earlier,)


def _around_fences(units: Sequence[_Unit], fences: Collection[int]) -> _Precedence:
    """A fence follows the units since the last one, and the units after it follow the fence."""
    fence: int | None = None
    since_fence: list[int] = []
    for unit in units:
        if fence is not None:
            yield unit.number, (fence,)
        if unit.number in fences:
            yield unit.number, since_fence
            fence = unit.number
            since_fence = []
        since_fence.append(unit.number)
