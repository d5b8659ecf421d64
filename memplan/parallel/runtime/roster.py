"""Who takes part, how far each has come, and who holds the others up. Pure: no sockets, no clock of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

SILENT_S = 2.0  # a process sends several messages in this time, whatever its main thread does
STOPPED_S = 3.0  # after that, seen stopped for so long it is lost; a whole run that was suspended goes on at once


@dataclass(frozen=True)
class Member:
    """One process of the run."""

    process: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.process} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Beat:
    """How far a process has come.

    Attributes:
      count: beats so far, counted from the start of this process.
      step: the number that the training loop gave its last beat, None before the first.
      at_s: when that was, on the clock of whoever holds this.
      limit_s: seconds after which the process is late; None while it does not want to be watched.
      finished: the process is on its way out and waits for nobody.
    """

    count: int = 0
    step: int | None = None
    at_s: float = 0.0
    limit_s: float | None = None
    finished: bool = False

    def next(self, step: int, now_s: float, limit_s: float) -> Beat:
        return replace(self, count=self.count + 1, step=step, at_s=now_s, limit_s=limit_s)

    def unwatched(self, *, finished: bool = False) -> Beat:
        return replace(self, limit_s=None, finished=finished)

    def told(self, now_s: float) -> str:
        if self.step is None:
            return "it had not begun a step"
        return f"last beat at step {self.step}, {max(0.0, now_s - self.at_s):.1f} s ago"


@dataclass(frozen=True)
class Seen:
    """A member as its observer knows it; `heard_s` is when its last message came."""

    member: Member
    beat: Beat
    heard_s: float


def gone(seen: Seen, now_s: float) -> str:
    return f"{seen.member} is gone: its connection closed; {seen.beat.told(now_s)}"


def silent(seen: Seen, now_s: float) -> str:
    quiet_s = now_s - seen.heard_s
    return (
        f"{seen.member} has been silent for {quiet_s:.1f} s: it is stopped, or its host or network is down; "
        f"{seen.beat.told(now_s)}"
    )


def held_up(everyone: Collection[Seen], now_s: float) -> str | None:
    """Who is late, once any process is past its limit; else None.

    All wait for one another in a collective, so whoever is past its limit first is rarely the culprit. That is a
    process that sends nothing at all, else one that has left, else whoever has fewer beats than the others.
    """
    running = [seen for seen in everyone if not seen.beat.finished]
    late = [seen for seen in running if seen.beat.limit_s is not None and now_s - seen.beat.at_s > seen.beat.limit_s]
    if not late:
        return None
    limit = f"the limit is {min(seen.beat.limit_s or 0.0 for seen in late):g} s"
    quiet = [seen for seen in running if now_s - seen.heard_s > SILENT_S]
    if quiet:
        return "; ".join(silent(seen, now_s) for seen in quiet)
    fewest, most = (pick(seen.beat.count for seen in running) for pick in (min, max))
    behind = [seen for seen in running if seen.beat.count == fewest]
    left = [seen for seen in everyone if seen.beat.finished and seen.beat.count < most]
    if left:
        named = ", ".join(f"{seen.member} finished, {seen.beat.told(now_s)}" for seen in left)
        return f"{named}, while the others wait in a later one; {limit}"
    if fewest < most:
        named = ", ".join(f"{seen.member} is late, {seen.beat.told(now_s)}" for seen in behind)
        waiting = sorted(seen.member.process for seen in running if seen.beat.count == most)
        return f"{named}; waiting further on: rank {', '.join(map(str, waiting))}; {limit}"
    oldest = min(running, key=lambda seen: seen.beat.at_s)
    return (
        f"no rank moves: all made as many beats; {oldest.member} is late for longest, {oldest.beat.told(now_s)}; "
        f"{limit}, which a step that is merely slow needs higher"
    )
