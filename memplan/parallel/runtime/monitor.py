"""Every process tells rank 0 several times a second how far it is; a death or a standstill ends all, with its name.

Rank 0 also hears what each gave to the run (`submissions`) and ends all where one differs (`comparison`), or where one
has left and another waits for it (`main_thread`).

A star: rank 0 holds a connection to each other rank. A killed process closes its connection, which is known at once.
The thread works while the main thread waits in a collective, since that waits outside Python; it ends the process
itself, since nothing else could.

jax's own coordination service is no substitute (jax 0.11.2 and 0.12.0.1, three processes on CPU). By default a rank
that exits or brings a batch fewer aborts the others after 5.5 to 6 s, and the innocent are named. With recoverability
and `get_live_nodes` a killed rank is known after 2.4 to 4.8 s (here 0.1 to 0.5 s), a dead rank 0 never, and healthy
runs that are suspended or unequal are killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from memplan.parallel.runtime import comparison, heartbeats
from memplan.parallel.runtime.comparison import Comparison, Submission
from memplan.parallel.runtime.heartbeats import SILENT_S, STOPPED_S, Heartbeat, Member, Peer
from memplan.parallel.runtime.messages import Connection, Message
from memplan.parallel.runtime.submissions import Submissions

EXIT_CODE = 75  # EX_TEMPFAIL: another process failed or this one stood still; starting again may well work
GRACE_S = 5.0  # a rank other than 0 leaves judging to rank 0 for this long
CONSEQUENCE_S = 2.0  # what failed here is often another's death, which is known within this time
BEHIND_S = 2.0  # standing this long for a rank that left with fewer batches
ALIKE_S = 6.0  # the same for one that left with as many: it may merely have been first to end the last step
UNKNOWN_S = 10.0  # where nobody can say what the main thread waits for, it is told who left, seldom
WARN_EVERY_S = 60.0


class Observer(Protocol):
    """What the main thread waits for (`main_thread.MainThreadObserver`, which knows jax)."""

    def sample(self, now_s: float) -> float: ...
    def waits_for(self, left: Collection[int]) -> bool | None: ...
    def waits_for_thread(self) -> bool: ...
    def where(self) -> str: ...


@dataclass(frozen=True)
class Departure:
    """A rank that left; `batches` are those it had begun, by key, `at_s` is when this process heard of it."""

    batches: Mapping[str, int]
    at_s: float


class Monitor(threading.Thread):
    """One per process; `heartbeat` is what it tells the others and may be replaced at any time by any thread."""

    def __init__(
        self,
        me: Member,
        members: Mapping[int, Member],
        connections: Mapping[int, Connection],
        silence_s: float,
        submissions: Submissions | None = None,
        observer: Observer | None = None,
    ):
        super().__init__(name="memplan monitor", daemon=True)
        now_s = time.monotonic()
        self.me = me
        self.members = dict(members)
        self.heartbeat = Heartbeat(at_s=now_s)
        self._connections = dict(connections)
        self._peers = {rank: Peer(members[rank], Heartbeat(at_s=now_s), now_s) for rank in connections}
        self._silence_s = silence_s
        self._pulse_s = 0.25 if len(members) <= 64 else 1.0
        self._ending = threading.Lock()
        self._submissions = submissions or Submissions()
        self._observer = observer
        self._comparison = Comparison(members)
        self._comparing = threading.Lock()
        self._left: dict[int, Departure] = {}
        self._complained_s: float | None = None
        self._warned_s = 0.0
        self._stopped: dict[int, float] = {}

    def run(self) -> None:
        next_s = 0.0
        self._submissions.attach(self._submit)
        with selectors.DefaultSelector() as ready:
            for rank, connection in self._connections.items():
                ready.register(connection, selectors.EVENT_READ, rank)
            while True:
                for key, _ in ready.select(self._pulse_s):
                    messages = self._connections[key.data].receive()
                    if messages is None:
                        ready.unregister(key.fileobj)
                        self._closed(key.data)
                    for message in messages or ():
                        self._receive(key.data, message)
                now_s = time.monotonic()
                if now_s >= next_s:
                    if not self.heartbeat.finished and not threading.main_thread().is_alive():
                        # others of its threads may keep it for ever
                        self.heartbeat = self.heartbeat.unwatched(finished=True)
                    self._send_heartbeat(now_s)
                    self._check_peers(now_s)
                    self._check_main_thread(now_s)
                    next_s = now_s + self._pulse_s

    def finish(self) -> None:
        """This process is on its way out: nobody is to take its end for a death."""
        self.heartbeat = self.heartbeat.unwatched(finished=True)
        self._send_heartbeat(time.monotonic())

    def fail(self, what: str) -> None:
        """This process failed: the others are told why, and it ends with exit code 1.

        First it waits for a verdict: the failure may be a collective's (a JaxRuntimeError or a mere ValueError) because
        another process is gone, and then that is what ends this one.
        """
        time.sleep(CONSEQUENCE_S)
        text = f"{self.me} failed: {what}"
        with self._ending:
            for connection in list(self._connections.values()):
                connection.send({"verdict" if self.me.process == 0 else "failed": text})
            self._exit(1)

    def _send_heartbeat(self, now_s: float) -> None:
        own = self.heartbeat
        message = {"count": own.count, "step": own.step, "age_s": now_s - own.at_s, "limit_s": own.limit_s,
                   "finished": own.finished, "batches": self._submissions.batches}  # fmt: skip
        for connection in list(self._connections.values()):
            connection.send(message)
        if self.me.process == 0:
            self._advance(0, message)

    def _submit(self, one: Submission) -> None:
        """What this process gave, to rank 0."""
        if self.me.process == 0:
            self._compare(0, one)
        elif connection := self._connections.get(0):
            connection.send({"said": asdict(one)})

    def _advance(self, rank: int, message: Message) -> None:
        """On rank 0: how far a rank is, and whether it has left."""
        with self._comparing:
            self._comparison.advance(rank, message["batches"])
        if message["finished"] and rank not in self._left:
            self._left = {**self._left, rank: Departure(message["batches"], time.monotonic())}
            for connection in list(self._connections.values()):
                connection.send({"left": rank, "batches": message["batches"]})
        self._compare()

    def _compare(self, rank: int = 0, one: Submission | None = None) -> None:
        """On rank 0, by its watch and by whoever gives something there."""
        with self._comparing:
            if one is not None:
                self._comparison.add(rank, one)
            settled, verdict = self._comparison.judge(time.monotonic(), self._left)
        if settled:
            for connection in list(self._connections.values()):
                connection.send({"settled": settled})
            self._submissions.confirm(settled)
        if verdict:
            self._end(verdict)

    def _receive(self, rank: int, message: Message) -> None:
        now_s = time.monotonic()
        if "verdict" in message:
            self._end(message["verdict"])
        elif "failed" in message:
            self._end(message["failed"])
        elif "said" in message:
            self._compare(rank, comparison.from_message(message["said"]))
        elif "settled" in message:
            self._submissions.confirm([(key, number) for key, number in message["settled"]])
        elif "left" in message:
            self._left = {**self._left, message["left"]: Departure(message["batches"], now_s)}
        else:
            heartbeat = Heartbeat(message["count"], message["step"], now_s - message["age_s"], message["limit_s"],
                                  message["finished"])  # fmt: skip
            self._peers[rank] = Peer(self._peers[rank].member, heartbeat, now_s)
            if self.me.process == 0:
                self._advance(rank, message)

    def _closed(self, rank: int) -> None:
        peer = self._peers[rank]
        del self._connections[rank]
        if not peer.heartbeat.finished:
            self._end(heartbeats.dead(peer, time.monotonic()))

    def _check_peers(self, now_s: float) -> None:
        others = list(self._peers.values())
        for peer in others:
            lost = now_s - peer.heard_s > self._silence_s or self._stopped_s(peer, now_s) > STOPPED_S
            if not peer.heartbeat.finished and lost:
                self._end(heartbeats.silent(peer, now_s))
        own = Peer(self.me, self.heartbeat, now_s)
        late = heartbeats.stalled([own, *others], now_s if self.me.process == 0 else now_s - GRACE_S)
        if late:
            self._end(late)

    def _stopped_s(self, peer: Peer, now_s: float) -> float:
        """For how long this process has seen that one, on its own host, stopped and silent."""
        member = peer.member
        quiet = now_s - peer.heard_s > SILENT_S and member.host == self.me.host
        if not quiet or not _is_stopped(member.pid):
            self._stopped.pop(member.process, None)
            return 0.0
        return now_s - self._stopped.setdefault(member.process, now_s)

    def _check_main_thread(self, now_s: float) -> None:
        """Does this process wait for one that has left?"""
        if self._complained_s is not None and now_s - self._complained_s > GRACE_S:
            self._end(self._waiting(now_s))  # rank 0 cannot be reached any more
        if not self._left or self._observer is None or self.heartbeat.finished or self._complained_s is not None:
            return
        still_s = min(self._observer.sample(now_s), now_s - min(departure.at_s for departure in self._left.values()))
        behind = any(self._is_behind(rank, departure) for rank, departure in self._left.items())
        if still_s < (BEHIND_S if behind else ALIKE_S):
            return
        waits = self._waits(self._observer, behind=behind)
        if waits or (waits is None and behind and still_s > UNKNOWN_S):
            self._complain(now_s)
        elif waits is None and still_s > UNKNOWN_S and now_s - self._warned_s > WARN_EVERY_S:
            self._warned_s = now_s
            os.write(2, f"memplan: {self._waiting(now_s)}, if it waits for others at all.\n".encode())

    def _waits(self, observer: Observer, *, behind: bool) -> bool | None:
        if behind and self._submissions.is_waiting and observer.waits_for_thread():
            return True  # for a thread that makes its batches, and that waits for the others' next
        with contextlib.suppress(Exception):  # the user's objects are asked what they are, and this thread must live
            return observer.waits_for(self._left)
        return None

    def _is_behind(self, rank: int, departure: Departure) -> bool:
        """It has left with fewer batches than are begun here of something that needs it."""
        own, ranks = self._submissions.batches, self._submissions.ranks
        return any(rank in ranks[key] and departure.batches.get(key, 0) < own[key] for key in own)

    def _complain(self, now_s: float) -> None:
        self._complained_s = now_s
        if self.me.process and 0 in self._connections:
            self._connections[0].send({"failed": self._waiting(now_s)})
        else:
            self._end(self._waiting(now_s))

    def _waiting(self, now_s: float) -> str:
        """Named are those that left with the fewest batches."""
        begun = {rank: sum(departure.batches.values()) for rank, departure in self._left.items()}
        ranks = [rank for rank in sorted(begun) if begun[rank] == min(begun.values())]
        gone_s = max(now_s - self._left[rank].at_s for rank in ranks)
        where = self._observer.where() if self._observer else "an unknown line"
        named = ", ".join(str(self.members[rank]) for rank in ranks)
        own = sum(self._submissions.batches.values())
        return (
            f"{named} left {gone_s:.1f} s ago with {begun[ranks[0]]} batches begun, while rank {self.me.process} has "
            f"begun {own} and waits at {where}"
        )

    def _end(self, verdict: str) -> None:
        """Tell everyone, say it here, leave. Only the first verdict counts."""
        with self._ending:
            for connection in list(self._connections.values()) if self.me.process == 0 else ():
                connection.send({"verdict": verdict})
            text = f"memplan: {verdict}.\nmemplan: {self.me} therefore ends with exit code {EXIT_CODE}.\n"
            os.write(2, text.encode())
            self._exit(EXIT_CODE)

    def _exit(self, code: int) -> None:
        flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold a stream for ever
        try:
            flushing.start()
            flushing.join(0.3)
        except RuntimeError:  # Python 3.12 starts no thread any more once the main thread has ended
            _flush()
        if self.me.process == 0:  # or the message could be lost with the connection
            end = time.monotonic() + 1.0
            for connection in list(self._connections.values()):
                connection.close(linger_s=max(0.01, end - time.monotonic()))
        os._exit(code)


def _is_stopped(pid: int) -> bool:
    """By a signal (state T), as the system of this machine says where it can."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
