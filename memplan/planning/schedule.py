"""A planner's solution: a schedule (actions in order), its bytes and its seconds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from memplan.planning.problem import Problem

CopySeconds = Callable[[int], float]  # bytes -> seconds of a copy, one way


class Kind(Enum):
    """The effect of an action.

    Copies are asynchronous: the device's buffer is live until `OFFLOADED`, the host's from `OFFLOAD` to the last
    `PREFETCHED`, the new one on the device from `PREFETCH` on, and may be read after `PREFETCHED`.
    """

    RUN = "run"
    OFFLOAD = "offload"
    OFFLOADED = "offloaded"
    PREFETCH = "prefetch"
    PREFETCHED = "prefetched"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan. A read sees what the last run or copy wrote to the buffer.

    Attributes:
      number: of the kernel that runs, a loop's body before the loop; or of the buffer that is copied.
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
      bound_s: lower bound of any plan within the budget.
      fits: it is within the budget; otherwise it is the smallest one that was found.
    """

    schedule: Schedule
    nbytes: int
    seconds: float
    host_nbytes: int
    bound_s: float
    fits: bool


def rank(solution: Solution) -> tuple[bool, float]:
    """Key of `min`: solutions that fit before those that do not, then the faster or the smaller first."""
    return not solution.fits, solution.seconds if solution.fits else solution.nbytes


def runs(numbers: Iterable[int]) -> Schedule:
    """A schedule of kernels one after another, without copies."""
    return tuple(Action(Kind.RUN, number) for number in numbers)


def seconds(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> float:
    """Seconds from the first kernel to the end of everything.

    Kernels run one after another, concurrently with one copy in each direction; a copy starts once its stream is free
    and its turn has come.

    Args:
      copy_s: not needed without copies.
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
            maker = problem.buffers[number].maker
            times = 1 if maker is None else problem.times[maker]
            free[kind] = max(clock, free[kind]) + copy_s(problem.buffers[number].nbytes) * times
            ends[kind, number] = free[kind]
    return max(clock, *free.values())
