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
class Heartbeat:
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

    def next(self, step: int, now_s: float, limit_s: float) -> Heartbeat:
        return replace(self, count=self.count + 1, step=step, at_s=now_s, limit_s=limit_s)

    def unwatched(self, *, finished: bool = False) -> Heartbeat:
        return replace(self, limit_s=None, finished=finished)

    def is_late(self, now_s: float) -> bool:
        return self.limit_s is not None and now_s - self.at_s > self.limit_s

    def described(self, now_s: float) -> str:
        if self.step is None:
            return "it had not begun a step"
        return f"last beat at step {self.step}, {max(0.0, now_s - self.at_s):.1f} s ago"


@dataclass(frozen=True)
class Peer:
    """A member as its observer knows it; `heard_s` is when its last message came."""

    member: Member
    heartbeat: Heartbeat
    heard_s: float


def dead(peer: Peer, now_s: float) -> str:
    return f"{peer.member} is gone: its connection closed; {peer.heartbeat.described(now_s)}"


def silent(peer: Peer, now_s: float) -> str:
    quiet_s = now_s - peer.heard_s
    return (
        f"{peer.member} has been silent for {quiet_s:.1f} s: it is stopped, or its host or network is down; "
        f"{peer.heartbeat.described(now_s)}"
    )


def stalled(peers: Collection[Peer], now_s: float) -> str | None:
    """Who is late, once any process is past its limit; else None.

    All wait for one another in a collective, so whoever is past its limit first is rarely the culprit. That is a
    process that sends nothing at all, else one that has left, else whoever has fewer beats than the others.
    """
    running = [peer for peer in peers if not peer.heartbeat.finished]
    late = [peer for peer in running if peer.heartbeat.is_late(now_s)]
    if not late:
        return None
    limit = f"the limit is {min(peer.heartbeat.limit_s or 0.0 for peer in late):g} s"
    quiet = [peer for peer in running if now_s - peer.heard_s > SILENT_S]
    if quiet:
        return "; ".join(silent(peer, now_s) for peer in quiet)
    fewest, most = (pick(peer.heartbeat.count for peer in running) for pick in (min, max))
    behind = [peer for peer in running if peer.heartbeat.count == fewest]
    left = [peer for peer in peers if peer.heartbeat.finished and peer.heartbeat.count < most]
    if left:
        named = ", ".join(f"{peer.member} finished, {peer.heartbeat.described(now_s)}" for peer in left)
        return f"{named}, while the others wait in a later one; {limit}"
    if fewest < most:
        named = ", ".join(f"{peer.member} is late, {peer.heartbeat.described(now_s)}" for peer in behind)
        waiting = sorted(peer.member.process for peer in running if peer.heartbeat.count == most)
        return f"{named}; waiting further on: rank {', '.join(map(str, waiting))}; {limit}"
    oldest = min(running, key=lambda peer: peer.heartbeat.at_s)
    last = oldest.heartbeat.described(now_s)
    return (
        f"no rank moves: all made as many beats; {oldest.member} is late for longest, {last}; "
        f"{limit}, which a step that is merely slow needs higher"
    )
