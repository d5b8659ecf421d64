"""The planning problem in stages: every kernel outside of loops is one, every temporary that it writes an item."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from memplan.planning.packing import live_nbytes, needed
from memplan.planning.problem import Problem, Role
from memplan.planning.schedule import Schedule, runs
from memplan.planning.stages import Pair, Stages

TICKS = 1_000_000  # of a step: times are whole numbers


@dataclass(frozen=True)
class Staged:
    """Stages of a problem.

    Attributes:
      outer: number of the kernel of each stage.
      items: number of the buffer of each item.
    """

    problem: Problem
    stages: Stages
    outer: tuple[int, ...]
    items: tuple[int, ...]

    def schedule(self, again: Iterable[Pair]) -> Schedule:
        """Runs of kernels; what runs again does so right before its stage, what it needs before it."""
        repeated: dict[int, set[int]] = defaultdict(set)
        for item, stage in again:
            maker = self.problem.buffers[self.items[item]].maker
            assert maker is not None
            repeated[stage].add(maker)
        order, inside = [], _inside(self.problem)
        for stage, number in enumerate(self.outer):
            order += [*sorted(repeated[stage]), *inside.get(number, ()), number]
        return needed(self.problem, runs(order))


def staged(problem: Problem, budget_bytes: int) -> Staged:
    """Stages whose budget is of temporaries; what loops hold inside, and what shares a place, is their own bytes."""
    outer = tuple(number for number, kernel in enumerate(problem.kernels) if kernel.within is None)
    stage_of = {number: stage for stage, number in enumerate(outer)}
    items = tuple(
        number
        for number, buffer in enumerate(problem.buffers)
        if buffer.role is Role.TEMPORARY and buffer.nbytes and buffer.maker in stage_of and buffer.place == number
    )
    items = tuple(sorted(items, key=lambda number: (problem.buffers[number].maker, number)))
    item_of = {number: item for item, number in enumerate(items)}
    total_s = sum(kernel.seconds for kernel in problem.kernels) or 1.0
    ticks: list[int | None] = []
    inputs, uses = [], [list[int]() for _ in items]
    for number in items:
        maker = problem.buffers[number].maker
        assert maker is not None
        kernel = problem.kernels[maker]
        apart = all(len(problem.places[problem.buffers[b].place]) == 1 for b in kernel.writes)
        repeatable = kernel.repeatable and apart and problem.outputs.isdisjoint(kernel.writes)
        ticks.append(round(kernel.seconds / total_s * TICKS) + 1 if repeatable else None)
        inputs.append(tuple(sorted(item_of[read] for read in kernel.reads if read in item_of)))
    for number, kernel in enumerate(problem.kernels):
        stage = stage_of[problem.outermost(number)]
        for read in kernel.reads:
            item = item_of.get(read)
            if item is not None and stage != stage_of[_maker(problem, read)]:
                uses[item].append(stage)
    stages = Stages(
        nbytes=tuple(problem.buffers[number].nbytes for number in items),
        ticks=tuple(ticks),
        inputs=tuple(inputs),
        home=tuple(stage_of[_maker(problem, number)] for number in items),
        uses=tuple(tuple(sorted(set(found))) for found in uses),
        working_nbytes=(0,) * len(outer),
        own_ticks=tuple(round(problem.kernels[number].seconds / total_s * TICKS) for number in outer),
        budget_bytes=budget_bytes,
        tick_s=total_s / TICKS,
        until=tuple(_until(problem, _maker(problem, number), stage_of) for number in items),
    )
    return _with_the_rest(Staged(problem, stages, outer, items))


def _with_the_rest(found: Staged) -> Staged:
    """Working bytes: what is there at each stage of the plain order beyond the items."""
    stages = found.stages
    counted = np.zeros(stages.count + 1, np.int64)
    for nbytes, home, uses in zip(stages.nbytes, stages.home, stages.uses, strict=True):
        counted[home] += nbytes
        counted[max((home, *uses)) + 1] -= nbytes
    there = live_nbytes(found.problem)
    at = np.zeros(stages.count, np.int64)
    stage = 0
    for number in range(len(found.problem.kernels)):
        at[stage] = max(at[stage], there[number])
        stage += number == found.outer[stage]
    working = at - np.cumsum(counted)[:-1]
    return replace(found, stages=replace(stages, working_nbytes=tuple(working.tolist())))


def _inside(problem: Problem) -> dict[int, list[int]]:
    """Kernels of each outer loop, in order."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, kernel in enumerate(problem.kernels):
        if kernel.within is not None:
            found[problem.outermost(number)].append(number)
    return found


def _maker(problem: Problem, buffer: int) -> int:
    maker = problem.buffers[buffer].maker
    assert maker is not None
    return maker


def _until(problem: Problem, number: int, stage_of: dict[int, int]) -> int:
    """The last stage before which a kernel may run again: then something is written over what it reads."""
    last = len(stage_of)
    for read in problem.kernels[number].reads:
        since = problem.buffers[read].maker
        for other in problem.places[problem.buffers[read].place]:
            maker = problem.buffers[other].maker
            if other != read and maker is not None and maker > (-1 if since is None else since):
                last = min(last, stage_of[problem.outermost(maker)])
    return last
