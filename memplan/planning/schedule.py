"""The answer of a planner to a problem: a schedule, which is actions in an order, its bytes and its seconds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from memplan.planning.problem import Problem

CopySeconds = Callable[[int], float]  # bytes -> seconds of a copy, one way


class Kind(Enum):
    """The effect of an action.

    Copies are asynchronous: the device's buffer is there until `OFFLOADED`, the host's from `OFFLOAD` to the last
    `PREFETCHED`, the new one on the device from `PREFETCH` on, and may be read after `PREFETCHED`.
    """

    RUN = "run"
    OFFLOAD = "offload"
    OFFLOADED = "offloaded"
    PREFETCH = "prefetch"
    PREFETCHED = "prefetched"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan. Every read is served by the run or the copy that made its buffer last.

    Attributes:
      number: of the kernel that runs, loops' bodies in front of the loop; of the buffer that is copied.
    """

    kind: Kind
    number: int


Schedule = tuple[Action, ...]


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
    """For `min`: solutions that fit before those that do not, then the faster or the smaller first."""
    return not solution.fits, solution.seconds if solution.fits else solution.nbytes


def runs(numbers: Iterable[int]) -> Schedule:
    """Kernels that run one after another, and no copies."""
    return tuple(Action(Kind.RUN, number) for number in numbers)


def seconds(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> float:
    """Seconds from the first kernel to the end of everything.

    Kernels run one after another, and beside them one copy at a time in each direction; a copy starts once its stream
    is free and its turn has come.

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
