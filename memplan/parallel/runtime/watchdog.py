"""No training loop hangs for ever: a rank that stands still ends the run on every rank, with its name.

    watchdog = Watchdog(cluster, timeout_s=60)
    for k in range(steps):
        with watchdog.step(k):
            state = step(state, batch(k))

Death of a process is noticed without it, see `memplan.parallel.initialize`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from memplan.errors import MemplanError
from memplan.parallel.runtime.cluster import Cluster

START_S = 600.0  # restoring, tracing and compiling lie between the first beats
STARTING = 4  # beats that may take as long: two steps, since the second may compile again


class Watchdog:
    """Ends the process with exit code 75 (`runtime.monitor.EXIT_CODE`) when any rank made no beat for its limit.

    Attributes:
      timeout_s: how long a rank may take from one beat to the next, the slowest save or evaluation included.
      start_s: the same for the first beats, which wait for the compiler; at least `timeout_s`.
    """

    def __init__(self, cluster: Cluster, timeout_s: float, *, start_s: float = START_S):
        if not timeout_s > 0:
            raise MemplanError(f"A watchdog with a timeout of {timeout_s} s would bite at once. Give it some seconds.")
        self.timeout_s = timeout_s
        self.start_s = max(start_s, timeout_s)
        self._monitor = cluster.monitor

    def beat(self, step: int) -> None:
        """Say that this process goes on; takes a few microseconds and sends nothing by itself."""
        if self._monitor is not None:
            own = self._monitor.heartbeat
            limit_s = self.start_s if own.count < STARTING else self.timeout_s
            self._monitor.heartbeat = own.next(int(step), time.monotonic(), limit_s)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A beat before and one after: tells a rank that waits inside a step from one that has not reached it."""
        self.beat(step)
        yield
        self.beat(step)

    def stop(self) -> None:
        """Training is over; what follows may take as long as it likes. A death is still noticed."""
        if self._monitor is not None:
            self._monitor.heartbeat = self._monitor.heartbeat.unwatched()
