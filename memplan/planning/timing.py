"""Seconds of a schedule: kernels one after another, and beside them one copy at a time in each direction."""

from __future__ import annotations

from collections.abc import Callable

from memplan.planning.problem import Problem
from memplan.planning.schedule import Kind, Schedule

CopySeconds = Callable[[int], float]  # bytes -> seconds of a copy, one way


def seconds(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> float:
    """From the first kernel to the end of everything. A copy starts once its stream is free and its turn has come.

    Args:
      copy_s: may be left out where nothing is copied.
    """
    clock = 0.0
    free = {Kind.OFFLOAD: 0.0, Kind.PREFETCH: 0.0}
    ends: dict[tuple[Kind, int], float] = {}
    for action in schedule:
        kind, number = action.kind, action.number
        if kind is Kind.RUN:
            clock += problem.kernels[number].seconds * problem.times[number]
        elif kind is Kind.OFFLOADED:
            clock = max(clock, ends[Kind.OFFLOAD, number])
        elif kind is Kind.PREFETCHED:
            clock = max(clock, ends[Kind.PREFETCH, number])
        else:
            assert copy_s is not None, "copies take time"
            free[kind] = max(clock, free[kind]) + copy_s(problem.buffers[number].nbytes)
            ends[kind, number] = free[kind]
    return max(clock, *free.values())
