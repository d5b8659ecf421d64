"""Every process tells rank 0 several times a second how far it is; a death or a standstill ends all, with its name.

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
from collections.abc import Mapping

from memplan.parallel.runtime import roster
from memplan.parallel.runtime.messages import Line, Message
from memplan.parallel.runtime.roster import Beat, Member, Seen

EXIT_CODE = 75  # EX_TEMPFAIL: another process failed or this one stood still; starting again may well work
GRACE_S = 5.0  # a rank other than 0 leaves judging to rank 0 for this long
CONSEQUENCE_S = 2.0  # what failed here is often another's death, which is known within this time


class Watch(threading.Thread):
    """One per process; `own` is what it tells the others and may be replaced at any time by any thread."""

    def __init__(self, me: Member, members: Mapping[int, Member], lines: Mapping[int, Line], silence_s: float):
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

    def run(self) -> None:
        next_s = 0.0
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
                    self._tell(now_s)
                    self._judge(now_s)
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
                   "finished": own.finished}  # fmt: skip
        for line in list(self._lines.values()):
            line.send(message)

    def _hear(self, rank: int, message: Message) -> None:
        now_s = time.monotonic()
        if "verdict" in message:
            self._end(message["verdict"])
        elif "failed" in message:
            self._end(message["failed"])
        else:
            beat = Beat(message["count"], message["step"], now_s - message["age_s"], message["limit_s"],
                        message["finished"])  # fmt: skip
            self._seen[rank] = Seen(self._seen[rank].member, beat, now_s)

    def _closed(self, rank: int) -> None:
        seen = self._seen[rank]
        del self._lines[rank]
        if not seen.beat.finished:
            self._end(roster.gone(seen, time.monotonic()))

    def _judge(self, now_s: float) -> None:
        others = list(self._seen.values())
        for seen in others:
            if not seen.beat.finished and now_s - seen.heard_s > self._silence_s:
                self._end(roster.silent(seen, now_s))
        own = Seen(self.me, self.own, now_s)
        late = roster.held_up([own, *others], now_s if self.me.process == 0 else now_s - GRACE_S)
        if late:
            self._end(late)

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
        flushing.start()
        flushing.join(0.3)
        if self.me.process == 0:  # or the message could be lost with the connection
            end = time.monotonic() + 1.0
            for line in list(self._lines.values()):
                line.hang_up(linger_s=max(0.01, end - time.monotonic()))
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
