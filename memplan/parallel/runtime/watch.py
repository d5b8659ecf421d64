"""Every process tells rank 0 several times a second how far it is; a death or a standstill ends all, with its name.

Rank 0 also hears what each gave to the run (`given`) and ends all where one differs (`ledger`), or where one has left
and another waits for it (`standing`).

A star: rank 0 holds a connection to each other rank. A killed process closes its connection, which is known at once.
The thread works while the main thread waits in a collective, since that waits outside Python; it ends the process
itself, since nothing else could.
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

from memplan.parallel.runtime import ledger, roster
from memplan.parallel.runtime.given import Given
from memplan.parallel.runtime.ledger import Ledger, Said
from memplan.parallel.runtime.messages import Line, Message
from memplan.parallel.runtime.roster import SILENT_S, STOPPED_S, Beat, Member, Seen

EXIT_CODE = 75  # EX_TEMPFAIL: another process failed or this one stood still; starting again may well work
GRACE_S = 5.0  # a rank other than 0 leaves judging to rank 0 for this long
CONSEQUENCE_S = 2.0  # what failed here is often another's death, which is known within this time
BEHIND_S = 2.0  # standing this long for a rank that left with fewer batches
ALIKE_S = 6.0  # the same for one that left with as many: it may merely have been first to end the last step
UNKNOWN_S = 10.0  # where nobody can say what the main thread waits for, it is told who left, seldom
AGAIN_S = 60.0


class Stands(Protocol):
    """Where the main thread stands (`standing.Standing`, which knows jax)."""

    def look(self, now_s: float) -> float: ...
    def waits(self, left: Collection[int]) -> bool | None: ...
    def in_lock(self) -> bool: ...
    def where(self) -> str: ...


@dataclass(frozen=True)
class Gone:
    """A rank that left; `batches` are those it had begun, by key, `at_s` is when this process heard of it."""

    batches: Mapping[str, int]
    at_s: float


class Watch(threading.Thread):
    """One per process; `own` is what it tells the others and may be replaced at any time by any thread."""

    def __init__(
        self,
        me: Member,
        members: Mapping[int, Member],
        lines: Mapping[int, Line],
        silence_s: float,
        given: Given | None = None,
        stands: Stands | None = None,
    ):
        super().__init__(name="memplan watch", daemon=True)
        now_s = time.monotonic()
        self.me = me
        self.members = dict(members)
        self.own = Beat(at_s=now_s)
        self._lines = dict(lines)
        self._seen = {rank: Seen(members[rank], Beat(at_s=now_s), now_s) for rank in lines}
        self._silence_s = silence_s
        self._pulse_s = 0.25 if len(members) <= 64 else 1.0
        self._ending = threading.Lock()
        self._given = given or Given()
        self._stands = stands
        self._ledger = Ledger(members)
        self._comparing = threading.Lock()
        self._left: dict[int, Gone] = {}
        self._complained_s: float | None = None
        self._told_s = 0.0
        self._stopped: dict[int, float] = {}

    def run(self) -> None:
        next_s = 0.0
        self._given.attach(self._post)
        with selectors.DefaultSelector() as ready:
            for rank, line in self._lines.items():
                ready.register(line, selectors.EVENT_READ, rank)
            while True:
                for key, _ in ready.select(self._pulse_s):
                    messages = self._lines[key.data].receive()
                    if messages is None:
                        ready.unregister(key.fileobj)
                        self._closed(key.data)
                    for message in messages or ():
                        self._hear(key.data, message)
                now_s = time.monotonic()
                if now_s >= next_s:
                    if not self.own.finished and not threading.main_thread().is_alive():
                        self.own = self.own.unwatched(finished=True)  # others of its threads may keep it for ever
                    self._tell(now_s)
                    self._judge(now_s)
                    self._look(now_s)
                    next_s = now_s + self._pulse_s

    def finish(self) -> None:
        """This process is on its way out: nobody is to take its end for a death."""
        self.own = self.own.unwatched(finished=True)
        self._tell(time.monotonic())

    def fail(self, what: str) -> None:
        """This process failed: the others are told why, and it ends with exit code 1.

        First it waits for a verdict: the failure may be a collective's (a JaxRuntimeError or a mere ValueError) because
        another process is gone, and then that is what ends this one.
        """
        time.sleep(CONSEQUENCE_S)
        text = f"{self.me} failed: {what}"
        with self._ending:
            for line in list(self._lines.values()):
                line.send({"verdict" if self.me.process == 0 else "failed": text})
            self._leave(1)

    def _tell(self, now_s: float) -> None:
        own = self.own
        message = {"count": own.count, "step": own.step, "age_s": now_s - own.at_s, "limit_s": own.limit_s,
                   "finished": own.finished, "batches": self._given.reached}  # fmt: skip
        for line in list(self._lines.values()):
            line.send(message)
        if self.me.process == 0:
            self._reached(0, message)

    def _post(self, one: Said) -> None:
        """What this process gave, to rank 0."""
        if self.me.process == 0:
            self._compare(0, one)
        elif line := self._lines.get(0):
            line.send({"said": asdict(one)})

    def _reached(self, rank: int, message: Message) -> None:
        """On rank 0: how far a rank is, and whether it has left."""
        with self._comparing:
            self._ledger.reached(rank, message["batches"])
        if message["finished"] and rank not in self._left:
            self._left = {**self._left, rank: Gone(message["batches"], time.monotonic())}
            for line in list(self._lines.values()):
                line.send({"left": rank, "batches": message["batches"]})
        self._compare()

    def _compare(self, rank: int = 0, one: Said | None = None) -> None:
        """On rank 0, by its watch and by whoever gives something there."""
        with self._comparing:
            if one is not None:
                self._ledger.hear(rank, one)
            settled, verdict = self._ledger.judge(time.monotonic(), self._left)
        if settled:
            for line in list(self._lines.values()):
                line.send({"settled": settled})
            self._given.settle(settled)
        if verdict:
            self._end(verdict)

    def _hear(self, rank: int, message: Message) -> None:
        now_s = time.monotonic()
        if "verdict" in message:
            self._end(message["verdict"])
        elif "failed" in message:
            self._end(message["failed"])
        elif "said" in message:
            self._compare(rank, ledger.received(message["said"]))
        elif "settled" in message:
            self._given.settle([(key, number) for key, number in message["settled"]])
        elif "left" in message:
            self._left = {**self._left, message["left"]: Gone(message["batches"], now_s)}
        else:
            beat = Beat(message["count"], message["step"], now_s - message["age_s"], message["limit_s"],
                        message["finished"])  # fmt: skip
            self._seen[rank] = Seen(self._seen[rank].member, beat, now_s)
            if self.me.process == 0:
                self._reached(rank, message)

    def _closed(self, rank: int) -> None:
        seen = self._seen[rank]
        del self._lines[rank]
        if not seen.beat.finished:
            self._end(roster.gone(seen, time.monotonic()))

    def _judge(self, now_s: float) -> None:
        others = list(self._seen.values())
        for seen in others:
            lost = now_s - seen.heard_s > self._silence_s or self._stopped_s(seen, now_s) > STOPPED_S
            if not seen.beat.finished and lost:
                self._end(roster.silent(seen, now_s))
        own = Seen(self.me, self.own, now_s)
        late = roster.held_up([own, *others], now_s if self.me.process == 0 else now_s - GRACE_S)
        if late:
            self._end(late)

    def _stopped_s(self, seen: Seen, now_s: float) -> float:
        """For how long this process has seen that one, on its own host, stopped and silent."""
        member = seen.member
        quiet = now_s - seen.heard_s > SILENT_S and member.host == self.me.host
        if not quiet or not _is_stopped(member.pid):
            self._stopped.pop(member.process, None)
            return 0.0
        return now_s - self._stopped.setdefault(member.process, now_s)

    def _look(self, now_s: float) -> None:
        """Does this process wait for one that has left?"""
        if self._complained_s is not None and now_s - self._complained_s > GRACE_S:
            self._end(self._waiting(now_s))  # rank 0 cannot be reached any more
        if not self._left or self._stands is None or self.own.finished or self._complained_s is not None:
            return
        still_s = min(self._stands.look(now_s), now_s - min(gone.at_s for gone in self._left.values()))
        behind = any(self._is_behind(rank, gone) for rank, gone in self._left.items())
        if still_s < (BEHIND_S if behind else ALIKE_S):
            return
        waits = self._waits(self._stands, behind=behind)
        if waits or (waits is None and behind and still_s > UNKNOWN_S):
            self._complain(now_s)
        elif waits is None and still_s > UNKNOWN_S and now_s - self._told_s > AGAIN_S:
            self._told_s = now_s
            os.write(2, f"memplan: {self._waiting(now_s)}, if it waits for others at all.\n".encode())

    def _waits(self, stands: Stands, *, behind: bool) -> bool | None:
        if behind and self._given.waits and stands.in_lock():
            return True  # for a thread that makes its batches, and that waits for the others' next
        with contextlib.suppress(Exception):  # the user's objects are asked what they are, and this thread must live
            return stands.waits(self._left)
        return None

    def _is_behind(self, rank: int, gone: Gone) -> bool:
        """It has left with fewer batches than are begun here of something that needs it."""
        own, among = self._given.reached, self._given.among
        return any(rank in among[key] and gone.batches.get(key, 0) < own[key] for key in own)

    def _complain(self, now_s: float) -> None:
        self._complained_s = now_s
        if self.me.process and 0 in self._lines:
            self._lines[0].send({"failed": self._waiting(now_s)})
        else:
            self._end(self._waiting(now_s))

    def _waiting(self, now_s: float) -> str:
        """Named are those that left with the fewest batches."""
        begun = {rank: sum(gone.batches.values()) for rank, gone in self._left.items()}
        ranks = [rank for rank in sorted(begun) if begun[rank] == min(begun.values())]
        gone_s = max(now_s - self._left[rank].at_s for rank in ranks)
        where = self._stands.where() if self._stands else "an unknown line"
        named = ", ".join(str(self.members[rank]) for rank in ranks)
        own = sum(self._given.reached.values())
        return (
            f"{named} left {gone_s:.1f} s ago with {begun[ranks[0]]} batches begun, while rank {self.me.process} has "
            f"begun {own} and waits at {where}"
        )

    def _end(self, verdict: str) -> None:
        """Tell everyone, say it here, leave. Only the first verdict counts."""
        with self._ending:
            for line in list(self._lines.values()) if self.me.process == 0 else ():
                line.send({"verdict": verdict})
            told = f"memplan: {verdict}.\nmemplan: {self.me} therefore ends with exit code {EXIT_CODE}.\n"
            os.write(2, told.encode())
            self._leave(EXIT_CODE)

    def _leave(self, code: int) -> None:
        flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold a stream for ever
        try:
            flushing.start()
            flushing.join(0.3)
        except RuntimeError:  # Python 3.12 starts no thread any more once the main thread has ended
            _flush()
        if self.me.process == 0:  # or the message could be lost with the connection
            end = time.monotonic() + 1.0
            for line in list(self._lines.values()):
                line.hang_up(linger_s=max(0.01, end - time.monotonic()))
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
