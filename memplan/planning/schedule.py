"""A planner's solution: a schedule (actions in order), its bytes and its seconds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class Clock:
    """A schedule in time."""

    ends: tuple[float, ...]  # by action: seconds on the compute stream after it; a copy's start takes none
    # link spans of `OFFLOAD` and of `PREFETCH`, each in order
    busy: Mapping[Kind, Sequence[tuple[float, float]]]

    @property
    def seconds(self) -> float:
        """From the first kernel to the end of everything."""
        return max([0.0, *self.ends[-1:], *(spans[-1][1] for spans in self.busy.values() if spans)])


def seconds(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> float:
    """Seconds from the first kernel to the end of everything; see `clock`."""
    return clock(problem, schedule, copy_s).seconds


def clock(problem: Problem, schedule: Schedule, copy_s: CopySeconds | None = None) -> Clock:
    """When a schedule's kernels and copies take place.

    Kernels run one after another, concurrently with one copy in each direction; a copy starts once its stream is free
    and its turn has come.

    Args:
      copy_s: not needed without copies.
    """
    now, ends = 0.0, list[float]()
    busy: dict[Kind, list[tuple[float, float]]] = {Kind.OFFLOAD: [], Kind.PREFETCH: []}
    copied: dict[tuple[Kind, int], float] = {}
    for action in schedule:
        kind, number = action.kind, action.number
        if kind is Kind.RUN:
            now += problem.kernels[number].seconds * problem.times[number]
        elif kind is Kind.OFFLOADED:
            now = max(now, copied[Kind.OFFLOAD, number])
        elif kind is Kind.PREFETCHED:
            now = max(now, copied[Kind.PREFETCH, number])
        else:
            assert copy_s is not None, "copies take time"
            maker = problem.buffers[number].maker
            times = 1 if maker is None else problem.times[maker]
            start = max([now, *(end for _, end in busy[kind][-1:])])
            copied[kind, number] = start + copy_s(problem.buffers[number].nbytes) * times
            busy[kind].append((start, copied[kind, number]))
        ends.append(now)
    return Clock(tuple(ends), busy)
