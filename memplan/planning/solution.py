"""What a planner answers to a problem: a schedule, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.schedule import Schedule


@dataclass(frozen=True)
class Solution:
    """A schedule that a planner found.

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


def rank(solution: Solution) -> tuple[bool, float]:
    """For `min`: what fits, the faster the better; else the smaller."""
    return not solution.fits, solution.seconds if solution.fits else solution.nbytes
