"""A planner's solution: a schedule (actions in order), its bytes and its seconds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from memplan.planning.clock import Clock
from memplan.planning.problem import Problem

CopySeconds = Callable[[int], float]  # bytes -> seconds of a copy, one way


class Kind(Enum):
    """The effect of an action.

    Copies are asynchronous. The buffer on the device is live until `OFFLOADED`, the one on the host
    from `OFFLOAD` to the last `PREFETCHED`. The new buffer on the device is live from `PREFETCH`
    on, and may be read after `PREFETCHED`.
    """

    RUN = "run"
    OFFLOAD = "offload"
    OFFLOADED = "offloaded"
    PREFETCH = "prefetch"
    PREFETCHED = "prefetched"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan. A read sees the value that the last run or copy wrote to the buffer.

    Attributes:
      number: of the kernel that runs, or of the buffer that is copied. A loop's body runs before
        the loop.
    """

    kind: Kind
    number: int


Schedule = tuple[Action, ...]


@dataclass(frozen=True)
class Solution:
    """A planner's schedule.

    Attributes:
      nbytes: of temporaries, as XLA lays them out.
      seconds: of a step, with kernels and copies on their streams.
      host_nbytes: of offloaded values.
      bound_s: lower bound on the seconds of any plan.
      fits: is it within the budget? If not, it is the smallest that the planner knows.
    """

    schedule: Schedule
    nbytes: int
    seconds: float
    host_nbytes: int
    bound_s: float
    fits: bool


def rank(solution: Solution) -> tuple[bool, float]:
    """Key of `min`: solutions that fit, the fastest first, then the others, the smallest first."""
    return not solution.fits, solution.seconds if solution.fits else solution.nbytes


def runs(numbers: Iterable[int]) -> Schedule:
    """A schedule of kernels one after another, without copies."""
    return tuple(Action(Kind.RUN, number) for number in numbers)


def seconds(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> float:
    """Seconds from the first kernel to the end of the last kernel and copy; see `simulate`."""
    return simulate(problem, schedule, copy_s)[1].end_s


def simulate(
    problem: Problem,
    schedule: Schedule,
    copy_s: CopySeconds | None = None,
) -> tuple[Sequence[float], Clock]:
    """By action: seconds on the compute stream after it; and the clock after the last.

    The start of a copy takes no time. The links are `Kind.OFFLOAD` and `Kind.PREFETCH`.

    Args:
      copy_s: not needed without copies.
    """
    clock = Clock()
    ends = list[float]()
    copied: dict[tuple[Kind, int], float] = {}  # (start, buffer) -> end of the copy
    for action in schedule:
        kind = action.kind
        number = action.number
        if kind is Kind.RUN:
            clock.run(problem.kernels[number].seconds * problem.times[number])
        elif kind is Kind.OFFLOADED:
            clock.wait(copied[Kind.OFFLOAD, number])
        elif kind is Kind.PREFETCHED:
            clock.wait(copied[Kind.PREFETCH, number])
        else:
            assert copy_s is not None, "copies take time"
            maker = problem.buffers[number].maker
            times = 1 if maker is None else problem.times[maker]
            copy_seconds = copy_s(problem.buffers[number].nbytes) * times
            _, copied[kind, number] = clock.copy(kind, copy_seconds)
        ends.append(clock.now_s)
    return ends, clock
