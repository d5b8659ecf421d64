"""A problem and a budget -> the schedule that keeps the budget and takes the least time."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.evict import evict, prune
from memplan.planning.kernels import staged
from memplan.planning.packing import pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import Schedule, runs
from memplan.planning.timing import CopySeconds, seconds


@dataclass(frozen=True)
class Found:
    """A plan.

    Attributes:
      nbytes: of temporaries, as XLA lays them out.
      seconds: of a step, kernels and copies on their streams.
      host_nbytes: of offloaded values.
      bound_s: no plan within the budget takes less.
      fits: it is within the budget; else it is the one with the least bytes that was found.
    """

    schedule: Schedule
    nbytes: int
    seconds: float
    host_nbytes: int
    bound_s: float
    fits: bool


def plan(problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None) -> Found:
    """A plan whose temporaries take at most `budget_nbytes`, if one is found.

    Args:
      host_nbytes: that offloaded values may take.
      copy_s: seconds of a copy, one way; None where nothing is offloaded.
    """
    plain = runs(range(len(problem.kernels)))
    bound_s = seconds(problem, plain)
    tried = [_found(problem, plain, budget_nbytes, bound_s, copy_s)]
    goal = budget_nbytes
    while not tried[-1].fits and len(tried) < 5:
        found = staged(problem, goal)
        again = prune(found.stages, evict(found.stages))
        tried.append(_found(problem, found.schedule(again), budget_nbytes, bound_s, copy_s))
        goal -= tried[-1].nbytes - budget_nbytes
    return min(tried, key=lambda one: (not one.fits, one.seconds if one.fits else one.nbytes))


def _found(
    problem: Problem, schedule: Schedule, budget_nbytes: int, bound_s: float, copy_s: CopySeconds | None
) -> Found:
    packed = pack(problem, schedule)
    took = seconds(problem, schedule, copy_s)
    return Found(schedule, packed.nbytes, took, packed.host_nbytes, bound_s, packed.nbytes <= budget_nbytes)


def floor(problem: Problem) -> tuple[int, int]:
    """Least bytes of temporaries that any plan needs, and the kernel that sets it."""
    found = staged(problem, 0)
    nbytes, stage = found.stages.floor
    return nbytes, found.outer[stage]
