"""The time of a step: kernels one after another on a compute stream, and copies on links.

Everything that says when a kernel runs or a copy ends asks this clock: the planner's schedules, the
candidates of its search, the replay of a compiled module, and the order of collectives.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence

Interval = tuple[float, float]  # start and end, in seconds


class Clock:
    """A compute stream and its links, each of which copies one value at a time, in order.

    Attributes:
      now_s: seconds on the compute stream.
      busy: by link: intervals of its copies, in order.
      stalls: intervals in which the compute stream waits, in order.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy: dict[Hashable, list[Interval]] = defaultdict(list)
        self.stalls: list[Interval] = []

    @property
    def end_s(self) -> float:
        """When the last kernel and the last copy are done."""
        return max([self.now_s, *map(self.free_s, self.busy)])

    def free_s(self, link: Hashable) -> float:
        """When a link is done with the copies that have started."""
        busy = self.busy[link]
        return busy[-1][1] if busy else 0.0

    def start_s(self, link: Hashable) -> float:
        """When a copy starts that is issued now."""
        return max(self.now_s, self.free_s(link))

    def run(self, seconds: float) -> None:
        """Run a kernel."""
        self.now_s += seconds

    def copy(self, link: Hashable, seconds: float) -> Interval:
        """Start a copy, which begins once its link is free."""
        start_s = self.start_s(link)
        interval = start_s, start_s + seconds
        self.busy[link].append(interval)
        return interval

    def wait(self, until_s: float) -> float:
        """Stall the compute stream until a time; returns the seconds of the stall."""
        stall_s = max(0.0, until_s - self.now_s)
        if stall_s:
            self.stalls.append((self.now_s, until_s))
            self.now_s = until_s
        return stall_s


def first_gap(busy: Sequence[Interval], since_s: float, seconds: float) -> float:
    """The start of a link's first gap of this length."""
    for start_s, end_s in busy[max(0, bisect_left(busy, (since_s,)) - 1) :]:
        if end_s <= since_s:
            continue
        if start_s - since_s >= seconds:
            break
        since_s = max(since_s, end_s)
    return since_s


def last_gap(busy: Sequence[Interval], until_s: float, seconds: float) -> float:
    """The latest start of a copy that ends before a time, in a gap of the link."""
    for start_s, end_s in reversed(busy):
        if start_s >= until_s:
            continue
        if until_s - end_s >= seconds:
            break
        until_s = min(until_s, start_s)
    return until_s - seconds
