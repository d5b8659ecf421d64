"""When the links to the host are busy beside a plan, and where another copy goes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memplan.planning.search.ledger import Copy, Ledger
from memplan.planning.timing import CopySeconds

Busy = list[tuple[float, float]]


class Links:
    """The clock of a ledger's plan, waits for copies included.

    Attributes:
      seconds: of the whole plan.
      ends: of every slot, when its own work ends.
      starts: of every slot, when its prelude begins.
      out, back: when the link each way is busy, in turn.
    """

    def __init__(self, ledger: Ledger, copy_s: CopySeconds) -> None:
        self._ledger, self._copy_s = ledger, copy_s
        self._nbytes = ledger.tape.nbytes
        self.out: Busy = []
        self.back: Busy = []
        self.on_host: dict[int, tuple[int, float]] = {}  # values: the slot behind which they are there, and when
        waits = self._simulate(np.cumsum(ledger.slot_seconds))
        late = np.cumsum(waits)
        self.ends = np.cumsum(ledger.slot_seconds) + late
        self.starts = np.concatenate([[0.0], self.ends[:-1]])
        ways = (busy[-1][1] for busy in (self.out, self.back) if busy)
        self.seconds = max(float(self.ends[-1]), *ways, 0.0)

    def _simulate(self, ends: np.ndarray) -> np.ndarray:
        """Of every slot, the seconds that the kernels wait before its end or right behind it."""
        waits = np.zeros(len(ends))
        if not self._ledger.copies:
            return waits
        late = out_free = back_free = 0.0
        out_ends: dict[int, float] = {}
        back_ends: dict[tuple[int, int], float] = {}
        for slot, kind, copy in events(self._ledger):
            now = float(ends[slot - 1] if slot and not kind else ends[slot] if kind else 0.0) + late
            value, wait = copy.value, 0.0
            if kind == 0:
                wait = max(0.0, back_ends[value, copy.back] - now)
            elif kind == 1:
                start = max(now, out_free)
                out_ends[value] = out_free = start + self._copy_s(self._nbytes[value])
                self.out.append((start, out_free))
            elif kind == 2:
                wait = max(0.0, out_ends[value] - now)
                self.on_host[value] = slot, now + wait
            else:
                start = max(now, back_free)
                back_ends[value, copy.back] = back_free = start + self._copy_s(self._nbytes[value])
                self.back.append((start, back_free))
            late += wait
            waits[slot] += wait
        return waits


def events(ledger: Ledger) -> list[tuple[int, int, Copy]]:
    """In order: slots, and what of a copy happens there.

    0: it is waited for, before the slot; 1: it goes, behind the slot; 2: it has gone; 3: it comes back.
    """
    found = []
    for copy in ledger.copies.values():
        use = ledger.use(copy)
        if use is not None:
            found += [(use, 0, use, copy), (copy.back, 3, use, copy)]
        if copy.out is not None:
            found += [(copy.out, 1, copy.gone, copy), (copy.gone, 2, copy.gone, copy)]
    found.sort(key=lambda event: (*event[:3], event[3].value, event[3].back))
    return [(slot, kind, copy) for slot, kind, _, copy in found]


@dataclass(frozen=True, slots=True)
class Offer:
    """A copy, and the seconds that it keeps a link busy and makes the kernels wait."""

    copy: Copy
    busy_s: float
    wait_s: float


class Offers:
    """Copies that could be made beside those of a ledger.

    Args:
      host_nbytes: that all of them together may take.
    """

    def __init__(self, ledger: Ledger, copy_s: CopySeconds, host_nbytes: int) -> None:
        self._ledger, self._copy_s, self._host_nbytes = ledger, copy_s, host_nbytes
        level = [*ledger.tape.slot_level, -1]
        outside = [one == -1 for one in level]
        count = ledger.tape.count
        self._later = list(range(count))  # the next slot behind which a copy may begin or end
        self._earlier = list(range(count))
        for slot in range(count - 2, -1, -1):
            self._later[slot] = slot if outside[slot + 1] else self._later[slot + 1]
        for slot in range(1, count):
            self._earlier[slot] = slot if outside[slot + 1] else self._earlier[slot - 1]
        self._outside = outside
        self.refresh()

    def refresh(self) -> None:
        """Look at the ledger again."""
        self.links = Links(self._ledger, self._copy_s)
        self._left = self._host_nbytes - sum(self._ledger.tape.nbytes[value] for value in self.links.on_host)

    def may(self, value: int) -> bool:
        tape = self._ledger.tape
        return self._outside[tape.home[value]] and (value in self.links.on_host or tape.nbytes[value] <= self._left)

    def busy_s(self, value: int) -> float:
        """Seconds of a copy, one way."""
        return self._copy_s(self._ledger.tape.nbytes[value])

    def of(self, value: int, use: int, hot: tuple[int, int]) -> Iterator[Offer]:
        """Ways to have a value on the host before a need: where nobody waits, and through all slots from `hot` on.

        Args:
          hot: the first and the last slot that its bytes crowd.
        """
        ledger, links, whole = self._ledger, self.links, self._ledger.tape.whole[value]
        if not self._outside[use] or (value, ledger.before(value, use)) in ledger.copies or not self.may(value):
            return
        moment, _ = ledger.served(value, use)
        made, before = max(moment >> 1, whole), self._later[ledger.before(value, use)]
        if use <= whole:
            return
        busy_s = self._copy_s(ledger.tape.nbytes[value])
        if value in links.on_host:
            there, _ = links.on_host[value]
            if there > before:
                return
            out, gone, least_gone, out_end = None, before, before, 0.0
        else:
            out, out_end = self._out(self._later[made], busy_s)
            gone = self._later[max(before, bisect_left(links.ends, out_end, hi=len(links.ends) - 1), out)]
            least_gone = self._later[max(before, out)]
        back, back_s = self._back(use, busy_s)
        for narrow in (False, True):
            away = gone if not narrow else max(least_gone, min(gone, hot[0] - 1))
            away = self._later[away]
            home = back if not narrow else self._earlier[min(use - 1, max(back, hot[1]))]
            if home <= away or home >= use or (narrow and (away, home) == (gone, back)):
                continue
            wait = 0.0 if out is None else max(0.0, out_end - float(links.ends[away]))
            if home != back:
                wait += max(0.0, max(float(links.ends[home]), self._free(home)) + busy_s - float(links.starts[use]))
            else:
                wait += back_s
            yield Offer(Copy(value, out, away, home), busy_s * (1 if out is None else 2), wait)

    def _free(self, slot: int) -> float:
        """When the link from the host has done what is asked for before the end of a slot."""
        at = bisect_right(self.links.back, (float(self.links.ends[slot]), float("inf")))
        return self.links.back[at - 1][1] if at else 0.0

    def _out(self, slot: int, busy_s: float) -> tuple[int, float]:
        """Behind which slot a copy leaves that may from this one on, and when it is gone."""
        ends = self.links.ends
        time = float(ends[slot])
        for start, end in self.links.out[max(0, bisect_left(self.links.out, (time,)) - 1) :]:
            if end <= time:
                continue
            if start - time >= busy_s:
                break
            time = max(time, end)
        slot = self._later[max(slot, bisect_right(ends, time) - 1)]  # asked for early, it waits for its turn
        return slot, max(time, float(ends[slot])) + busy_s

    def _back(self, use: int, busy_s: float) -> tuple[int, float]:
        """Behind which slot a copy begins to come back so that nobody waits, and for how long they do all the same."""
        links = self.links
        time = float(links.starts[use])
        for start, end in reversed(links.back):
            if start >= time:
                continue
            if time - end >= busy_s:
                break
            time = min(time, start)
        slot = bisect_right(links.ends, time - busy_s, hi=use) - 1
        return (self._earlier[slot], 0.0) if slot >= 0 else (-1, 0.0)
