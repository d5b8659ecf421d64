"""A planner's solution: a schedule (actions in order), its bytes and its seconds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

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


@dataclass(frozen=True)
class Clock:
    """A schedule in time."""

    # by action: seconds on the compute stream after it; the start of a copy takes none
    ends: tuple[float, ...]
    # link spans of `OFFLOAD` and of `PREFETCH`, each in order
    busy: Mapping[Kind, Sequence[tuple[float, float]]]

    @property
    def seconds(self) -> float:
        """From the first kernel to the end of the last kernel and copy."""
        return max([0.0, *self.ends[-1:], *(spans[-1][1] for spans in self.busy.values() if spans)])


def seconds(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> float:
    """Seconds from the first kernel to the end of the last kernel and copy; see `clock`."""
    return clock(problem, schedule, copy_s).seconds


def clock(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> Clock:
    """The times of a schedule's kernels and copies.

    Kernels run one after another, concurrently with one copy in each direction. A copy starts after
    its action, once its stream is free.

    Args:
      copy_s: not needed without copies.
    """
    compute_s = 0.0
    ends = list[float]()
    busy: dict[Kind, list[tuple[float, float]]] = {Kind.OFFLOAD: [], Kind.PREFETCH: []}
    copied: dict[tuple[Kind, int], float] = {}  # (start, buffer) -> end of the copy
    for action in schedule:
        kind = action.kind
        number = action.number
        if kind is Kind.RUN:
            compute_s += problem.kernels[number].seconds * problem.times[number]
        elif kind is Kind.OFFLOADED:
            compute_s = max(compute_s, copied[Kind.OFFLOAD, number])
        elif kind is Kind.PREFETCHED:
            compute_s = max(compute_s, copied[Kind.PREFETCH, number])
        else:
            assert copy_s is not None, "copies take time"
            maker = problem.buffers[number].maker
            times = 1 if maker is None else problem.times[maker]
            start = max([compute_s, *(end for _, end in busy[kind][-1:])])
            copied[kind, number] = start + copy_s(problem.buffers[number].nbytes) * times
            busy[kind].append((start, copied[kind, number]))
        ends.append(compute_s)
    return Clock(tuple(ends), busy)
