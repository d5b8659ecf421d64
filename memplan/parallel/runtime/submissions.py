"""What this process gives to its run: sent to rank 0, and waited for until the others have given the same.

It begins before the ranks have met: what was given until then is sent once they have.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from memplan.parallel.runtime.comparison import Submission

PROGRAM_S = 5.0  # a step may be looked at by one rank alone, which must not wait for ever
WARN_S = 10.0  # whoever waits longer says so
WARN_EVERY = 6  # and once a minute from then on


class Submissions:
    """Any thread may give; `confirm` is called by whoever hears rank 0."""

    def __init__(self) -> None:
        self.batches: dict[str, int] = {}  # batches begun, by key
        self.ranks: dict[str, tuple[int, ...]] = {}  # who must bring them
        self.disabled = False  # nobody will ever answer
        self.is_waiting = False  # a thread waits for the others' next batch
        self._order = threading.Lock()  # of what is sent: never held by whoever hears rank 0
        self._confirmed = threading.Condition()
        self._places: set[tuple[str, int]] = set()
        self._send: Callable[[Submission], None] | None = None
        self._unsent: list[Submission] = []
        self._last: dict[str, str] = {}
        self._programs: dict[str, list[str]] = {}

    def attach(self, send: Callable[[Submission], None]) -> None:
        """From now on everything is sent by `send`, what has been said before first."""
        with self._order:
            for one in self._unsent:
                send(one)
            self._unsent, self._send = [], send

    def confirm(self, places: list[tuple[str, int]]) -> None:
        with self._confirmed:
            self._places.update(places)
            self._confirmed.notify_all()

    def disable(self) -> None:
        """The ranks cannot be compared: nobody is to wait."""
        with self._confirmed:
            self.disabled = True
            self._confirmed.notify_all()

    def submit_values(self, one: Submission) -> None:
        """Compared when all next give rows or a program; waits for nobody."""
        with self._order:
            self._last.clear()  # so that the next rows count as new
            self._submit(one)

    def submit_program(self, one: Submission) -> None:
        """Waits until all have given it, for `PROGRAM_S` at most: later it is compared all the same."""
        with self._order:
            known = self._programs.setdefault(one.key, [])
            new = one.digest not in known
            if new:
                known.append(one.digest)
            one = replace(one, number=known.index(one.digest))
            if new:
                self._submit(one)
        with self._confirmed:
            self._confirmed.wait_for(lambda: self.disabled or one.place in self._places, PROGRAM_S)

    def submit_rows(self, one: Submission) -> None:
        """The next batch. Where it brings other rows than the last, waits until all have come as far."""
        with self._order:
            one = replace(one, number=self.batches.get(one.key, 0) + 1)
            new = self._last.get(one.key) != one.digest
            if new:
                self._last[one.key] = one.digest
                self._submit(one)
            self.ranks = {**self.ranks, one.key: one.among}
            self.batches = {**self.batches, one.key: one.number}  # told after what is new in it
        if new:
            self._wait(one)

    def _wait(self, one: Submission) -> None:
        with self._confirmed:
            self.is_waiting = True
            for turn in itertools.count():
                if self._confirmed.wait_for(lambda: self.disabled or one.place in self._places, WARN_S):
                    break
                if turn % WARN_EVERY == 0:
                    sys.stderr.write(
                        f"memplan: waiting for the other ranks to bring batch {one.number} of {one.name}.\n"
                    )
            self._places.discard(one.place)
            self.is_waiting = False

    def _submit(self, one: Submission) -> None:
        if self._send is not None:
            self._send(one)
        elif not self.disabled:
            self._unsent.append(one)
