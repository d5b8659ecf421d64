"""What this process gave to its run: told to rank 0, and waited for until the others gave the same.

It begins before the ranks have met: what was said until then is told once they have.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from memplan.parallel.runtime.ledger import Said

PROGRAM_S = 5.0  # a step may be looked at by one rank alone, which must not wait for ever
TOLD_S = 10.0  # whoever waits longer says so
TURNS = 6  # and once a minute from then on


class Given:
    """Any thread may give; `settle` is called by whoever hears rank 0."""

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}  # batches begun, by key
        self.among: dict[str, tuple[int, ...]] = {}  # who must bring them
        self.off = False  # nobody will ever answer
        self.waits = False  # a thread waits for the others' next batch
        self._order = threading.Lock()  # of what is sent: never held by whoever hears rank 0
        self._settled = threading.Condition()
        self._places: set[tuple[str, int]] = set()
        self._post: Callable[[Said], None] | None = None
        self._unsent: list[Said] = []
        self._last: dict[str, str] = {}
        self._programs: dict[str, list[str]] = {}

    def attach(self, post: Callable[[Said], None]) -> None:
        """From now on everything is told by `post`, what has been said before first."""
        with self._order:
            for one in self._unsent:
                post(one)
            self._unsent, self._post = [], post

    def settle(self, places: list[tuple[str, int]]) -> None:
        with self._settled:
            self._places.update(places)
            self._settled.notify_all()

    def silence(self) -> None:
        """The ranks cannot be compared: nobody is to wait."""
        with self._settled:
            self.off = True
            self._settled.notify_all()

    def values(self, one: Said) -> None:
        """Compared when all next give rows or a program; waits for nobody."""
        with self._order:
            self._last.clear()  # so that the next rows count as new
            self._say(one)

    def program(self, one: Said) -> None:
        """Waits until all have given it, for `PROGRAM_S` at most: later it is compared all the same."""
        with self._order:
            known = self._programs.setdefault(one.key, [])
            new = one.digest not in known
            if new:
                known.append(one.digest)
            one = replace(one, number=known.index(one.digest))
            if new:
                self._say(one)
        with self._settled:
            self._settled.wait_for(lambda: self.off or one.place in self._places, PROGRAM_S)

    def rows(self, one: Said) -> None:
        """The next batch. Where it brings other rows than the last, waits until all have come as far."""
        with self._order:
            one = replace(one, number=self.reached.get(one.key, 0) + 1)
            new = self._last.get(one.key) != one.digest
            if new:
                self._last[one.key] = one.digest
                self._say(one)
            self.among = {**self.among, one.key: one.among}
            self.reached = {**self.reached, one.key: one.number}  # told after what is new in it
        if new:
            self._wait(one)

    def _wait(self, one: Said) -> None:
        with self._settled:
            self.waits = True
            for turn in itertools.count():
                if self._settled.wait_for(lambda: self.off or one.place in self._places, TOLD_S):
                    break
                if turn % TURNS == 0:
                    sys.stderr.write(
                        f"memplan: waiting for the other ranks to bring batch {one.number} of {one.name}.\n"
                    )
            self._places.discard(one.place)
            self.waits = False

    def _say(self, one: Said) -> None:
        if self._post is not None:
            self._post(one)
        elif not self.off:
            self._unsent.append(one)
