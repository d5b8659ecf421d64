"""Evict until it fits: what crosses crowded slots is made again, where a byte above the limit costs the least time.

A candidate is a gap: a value, the slot before which it is needed again, and the last one before that knows of it. The
chain of operations that makes it again grows source by source: what a source is computed from is there anyway, or held
longer, or made again with it, whichever removes the most bytes above the limit for its seconds. Candidates wait in a
heap by what they were worth when they were last looked at, and are looked at again before they are taken. Whatever the
limit does not need is taken back at the end, dearest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memplan.planning.search.ledger import Copy, Ledger
from memplan.planning.search.links import Offers

LEAST_SHARE = 5e-4  # values smaller than this share of the limit stay where they are
_NEARLY = 0.9  # of what the next best may be worth is enough: fewer looks, and no worse plans
_EFFORTS = ((10, 0), (40, 0), (10, 8))  # in turn where nothing helps: longest chain, slots by which it runs early


@dataclass(frozen=True, slots=True)
class Chain:
    """Operations that run again before a slot, bytes times slots above the limit that this removes, and its time."""

    operations: tuple[int, ...]
    slot: int
    gain: float
    seconds: float

    @property
    def worth(self) -> float:
        return self.gain / self.seconds


@dataclass(frozen=True, slots=True)
class Moving:
    """A copy, bytes times slots above the limit that it removes, and its price."""

    copy: Copy
    gain: float
    seconds: float
    wait_s: float

    @property
    def worth(self) -> float:
        return self.gain / self.seconds


@dataclass
class Eviction:
    """Repetitions and copies on a ledger until it keeps a limit.

    Attributes:
      banned: values and slots that are not tried.
      taste: by value, what its worth is multiplied by; all alike where empty.
      power: of the bytes above the limit, what a slot weighs: 1 looks at all of them alike, more at the fullest first.
      offers: copies that could be made; None where nothing is offloaded.
      idle_price: of a second of a link that nobody waits for, in seconds.
      waits: copies that keep the kernels waiting are made too.
      early_at_first: slots by which something may run again early from the beginning.
      looks: how many chains were looked at: the effort, whatever the machine.
    """

    ledger: Ledger
    limit: int
    banned: set[tuple[int, int]] = field(default_factory=set)
    taste: Sequence[float] = ()
    power: float = 1.0
    offers: Offers | None = None
    idle_price: float = 0.1
    waits: bool = True
    early_at_first: int = 0
    looks: int = 0

    def __post_init__(self) -> None:
        self.tape, self.limit = self.ledger.tape, max(1, self.limit)
        self.least = max(1, int(LEAST_SHARE * self.limit))
        self.early = 0
        self.tick = 1e-7 * (sum(self.tape.slot_seconds) or 1.0)  # nothing is for nothing

    def run(self) -> bool:
        """Make chains until the limit is kept; False where none helps any more."""
        effort = 0
        while self.excess():
            longest, early = _EFFORTS[effort]
            self.early = max(early, self.early_at_first)
            effort = 0 if self._sweep(longest) else effort + 1
            if effort == len(_EFFORTS):
                return False
        return True

    def excess(self) -> float:
        """What the slots above the limit weigh."""
        return self._weigh(self.ledger.load)

    def _weigh(self, load: np.ndarray) -> float:
        if self.power == 1:
            return (int(np.maximum(load, self.limit).sum()) - self.limit * len(load)) / self.limit
        return float((((np.maximum(load, self.limit) - self.limit) / self.limit) ** self.power).sum())

    def _crowded(self) -> list[float]:
        """Per slot, what a byte weighs in all those before."""
        over = np.maximum(self.ledger.load - self.limit, 0) / self.limit
        weights = over > 0 if self.power == 1 else self.power * over ** (self.power - 1)
        return np.concatenate([[0.0], np.cumsum(weights)]).tolist()

    def _sweep(self, longest: int) -> bool:
        """Take candidates, best first; False if there was none to take."""
        crowded = self._crowded()
        self.heap: list[tuple[float, int, int]] = []
        for value in range(len(self.tape.nbytes)):
            self._offer(value, crowded)
        heapq.heapify(self.heap)
        taken, left = False, self.excess()
        looked: dict[tuple[int, int], Chain | Moving] = {}
        while self.heap and left:
            _, value, slot = heapq.heappop(self.heap)
            found = self._look(value, slot, longest)
            if found is None:
                continue
            worth = found.worth * (self.taste[value] if self.taste else 1.0)
            if self.heap and worth < _NEARLY * -self.heap[0][0] and looked.get((value, slot)) != found:
                looked[value, slot] = found
                heapq.heappush(self.heap, (-worth, value, slot))
                continue
            before_s = 0.0 if self.offers is None else self.offers.links.seconds
            fresh = self._take(found)
            now = self.excess()
            if now >= left or self._waits_more(found, before_s):
                self._give_back(found, fresh)
                self.banned.add((value, slot))
                continue
            left, taken = now, True
            crowded = self._crowded()
            for one in self._touched(found):
                self._offer(one, crowded, push=True)
        return taken

    def _offer(self, value: int, crowded: list[float], push: bool = False) -> None:
        """Gaps of a value that touch crowded slots, and what ending them could be worth at most."""
        nbytes = self.tape.nbytes[value]
        price = self._price(value)
        if nbytes < self.least or price is None:
            return
        for slot in self.ledger.needs[value]:
            before = self.ledger.before(value, slot)
            for at in range(max(before + 1, slot - self.early), slot + 1):
                hot = crowded[at] - crowded[min(before + 1, at)]
                if (hot or self.early) and crowded[slot] > crowded[before + 1] and (value, at) not in self.banned:
                    worth = max(hot, 1e-9) * nbytes / self.limit / price * (self.taste[value] if self.taste else 1.0)
                    entry = (-worth, value, at)
                    if push:
                        heapq.heappush(self.heap, entry)
                    else:
                        self.heap.append(entry)

    def _price(self, value: int) -> float | None:
        """What it takes at least to bring a value back, None where that is not possible."""
        maker = self.tape.maker[value]
        prices = [] if maker < 0 or self.tape.seconds[maker] is None else [self.tape.seconds[maker] or 0.0]
        if self.offers is not None and self.offers.may(value):
            prices.append(self.idle_price * self.offers.busy_s(value))
        return min(prices) + self.tick if prices else None

    def _look(self, value: int, slot: int, longest: int) -> Chain | Moving | None:
        """The best way to end a gap."""
        self.looks += 1
        ways: list[Chain | Moving] = []
        chain = self.chain(value, slot, longest)
        if chain is not None:
            ways.append(chain)
        ways += self._movings(value, slot)
        return max(ways, key=lambda way: way.worth, default=None)

    def _movings(self, value: int, slot: int) -> Iterator[Moving]:
        if self.offers is None or slot not in self.ledger.needs[value]:
            return
        nbytes, load = self.tape.nbytes[value], self.ledger.load
        before = self.ledger.before(value, slot)
        hot = np.flatnonzero(load[before + 1 : slot] > self.limit) + before + 1
        if not len(hot):
            return
        for offer in self.offers.of(value, slot, (int(hot[0]), int(hot[-1]))):
            there = load[offer.copy.gone + 1 : offer.copy.back + 1]
            gain = self._weigh(there) - self._weigh(there - nbytes)
            if gain > 0 and (self.waits or offer.wait_s <= 0):
                price = offer.wait_s + self.idle_price * offer.busy_s + self.tick
                yield Moving(offer.copy, gain, price, offer.wait_s)

    def _take(self, found: Chain | Moving) -> tuple[int, ...]:
        """Carry it out; the operations that did not run there before."""
        fresh: tuple[int, ...] = ()
        if isinstance(found, Moving):
            self.ledger.move(found.copy)
        else:
            fresh = tuple(op for op in found.operations if op not in self.ledger.again[found.slot])
            for op in fresh:
                self.ledger.add(op, found.slot)
        self._refresh()
        return fresh

    def _give_back(self, found: Chain | Moving, fresh: tuple[int, ...]) -> None:
        if isinstance(found, Moving):
            self.ledger.unmove(found.copy)
        else:
            for op in reversed(fresh):
                self.ledger.remove(op, found.slot)
        self._refresh()

    def _waits_more(self, found: Chain | Moving, before_s: float) -> bool:
        """Does a copy keep the kernels waiting for longer than it was thought to, through others that it delays?"""
        if self.offers is None or not isinstance(found, Moving):
            return False
        return self.offers.links.seconds - before_s > 1.5 * found.wait_s + self.tick

    def _refresh(self) -> None:
        if self.offers is not None:
            self.offers.refresh()

    def _touched(self, found: Chain | Moving) -> Iterator[int]:
        """Values whose gaps are others now."""
        if isinstance(found, Moving):
            yield found.copy.value
        else:
            for op in found.operations:
                yield from (*self.tape.writes[op], *self.tape.reads[op])

    def chain(self, value: int, slot: int, longest: int) -> Chain | None:
        """The best way to make a value again before a slot, None where none removes anything."""
        ledger, tape = self.ledger, self.tape
        start = tape.maker[value]
        if (
            start < 0
            or slot not in ledger.needs[value]
            or start in ledger.again[slot]
            or ledger.served(value, slot)[0] == 2 * slot
        ):
            return None
        if not tape.may(start, slot):
            return None
        again, best = [start], None
        while True:
            made = {one for op in again for one in tape.writes[op]}
            spans, low, freed = [], slot, 0
            for one in made:
                moment, last = ledger.served(one, slot)
                if last < slot or moment == 2 * slot:
                    continue
                before = ledger.before(one, slot)
                nbytes = tape.nbytes[one]
                freed += nbytes if last > slot or ledger.is_own(one, slot) else 0
                if before + 1 < slot:
                    spans.append((before + 1, -nbytes))
                    low = min(low, before + 1)
            missing = self._missing(again, made, slot)
            for source, last in missing.items():
                spans.append((last + 1, tape.nbytes[source]))
                low = min(low, last + 1)
            if low < slot:
                found = self._priced(again, made, slot, spans, low, freed, missing)
                if found is not None and (best is None or found.worth > best.worth):
                    best = found
            more = self._dearest(missing, slot, again) if len(again) < longest else None
            if more is None:
                return best
            again.append(more)

    def _missing(self, again: Collection[int], made: set[int], slot: int) -> dict[int, int]:
        """What the operations read and would have to be held for, and the last slot that knows of it."""
        found = {}
        for op in again:
            for source in self.tape.reads[op]:
                if source not in made and source not in found:
                    last = self.ledger.served(source, slot)[1]
                    if last < slot:
                        found[source] = last
        return found

    def _priced(
        self,
        again: list[int],
        made: set[int],
        slot: int,
        spans: list[tuple[int, int]],
        low: int,
        freed: int,
        missing: dict[int, int],
    ) -> Chain | None:
        change = np.zeros(slot - low + 1, np.int64)
        for first, nbytes in spans:
            change[first - low] += nbytes
        change = np.cumsum(change)[:-1]
        load = self.ledger.load[low:slot]
        gain = self._weigh(load) - self._weigh(load + change)
        if gain <= 0:
            return None
        order = tuple(sorted(again))
        held = sum(self.tape.nbytes[source] for source in missing)
        gain -= self._transient(order, made, slot, int(self.ledger.through[slot]) - freed + held)
        if gain <= 0:
            return None
        seconds = sum(self.tape.seconds[op] or 0.0 for op in order) + self.tick
        return Chain(order, slot, gain, seconds)

    def _transient(self, order: tuple[int, ...], made: set[int], slot: int, here: int) -> float:
        """Bytes above the limit while the operations run, added up."""
        if here + sum(self.tape.nbytes[value] for value in made) <= self.limit:
            return 0.0
        tape, ledger, more = self.tape, self.ledger, 0.0
        last_read = {value: number for number, op in enumerate(order) for value in tape.reads[op]}
        alive: list[int] = []
        for number, op in enumerate(order):
            for value in tape.writes[op]:
                if not tape.sheds[op] or value in last_read or ledger.served(value, slot)[1] >= slot:
                    here += tape.nbytes[value]
                    alive.append(value)
            ended = [
                value for value in alive if ledger.served(value, slot)[1] < slot and last_read.get(value, -1) <= number
            ]
            over = sum(tape.nbytes[value] for value, sources in tape.over[op] if not set(sources).isdisjoint(ended))
            more += (max(0, here - over - self.limit) / self.limit) ** self.power
            here -= sum(tape.nbytes[value] for value in ended)
            alive = [value for value in alive if value not in ended]
        return more

    def _dearest(self, missing: dict[int, int], slot: int, again: list[int]) -> int | None:
        """The maker of the source whose holding takes the most, of those that may run again."""
        ledger, tape, best = self.ledger, self.tape, None
        for source, last in missing.items():
            maker = tape.maker[source]
            if maker in again or not tape.may(maker, slot):
                continue
            nbytes = tape.nbytes[source]
            crowded = int(np.count_nonzero(ledger.load[last + 1 : slot] > self.limit - nbytes))
            found = (nbytes * max(1, crowded), -source, maker)
            if best is None or found > best:
                best = found
        return None if best is None else best[2]


def take_back(ledger: Ledger, limit: int) -> None:
    """Take back whatever the limit does not need, dearest repetitions first, then copies, then what nobody uses."""
    limit = max(limit, ledger.peak_nbytes)
    dear = sorted(ledger.pairs(), key=lambda pair: (-(ledger.tape.seconds[pair[0]] or 0.0), pair))
    for op, slot in dear:
        ledger.remove(op, slot)
        if ledger.peak_nbytes > limit:
            ledger.add(op, slot)
    for key in sorted(ledger.copies):
        if key in ledger.copies:
            gone = drop(ledger, ledger.copies[key])
            if ledger.peak_nbytes > limit:
                for copy in gone:
                    ledger.move(copy)
    for op, slot in reversed(ledger.pairs()):
        if all(ledger.served(value, slot) == (2 * slot, slot) for value in ledger.tape.writes[op]):
            used = any(slot in ledger.needs[value] for value in ledger.tape.writes[op])
            if not used:
                ledger.remove(op, slot)


def drop(ledger: Ledger, copy: Copy) -> list[Copy]:
    """Take a copy back, and those that come from the same bytes on the host."""
    gone = [copy]
    if copy.out is not None:
        gone += [one for one in ledger.copies.values() if one.value == copy.value and one.out is None]
    for one in gone:
        ledger.unmove(one)
    return gone
