"""Evict until the plan fits: values live in crowded slots are recomputed or offloaded, the cheapest per byte first.

Greedy with a price per byte, as DTR (Kirisame et al., ICLR 2021), but the whole step is known: a *gap* is a value, the
slot before which it is needed again, and the last slot before that needs it. A chain of recomputation (`chains`) or an
offload (`links`) ends a gap. Gaps wait in a heap, ordered by their worth when last evaluated, and are evaluated again
before they are ended (lazy greedy: Minoux 1978). Decisions that the limit does not need are pruned at the end, dearest
first.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.search.chains import Chains, Excess, RecomputeChain
from memplan.planning.search.effort import DEFAULT, Effort
from memplan.planning.search.ledger import Ledger, Offload
from memplan.planning.search.links import CopyScheduler


@dataclass(frozen=True, slots=True)
class PricedOffload:
    """An offload, the excess that it removes, its price in seconds, and the seconds that kernels stall for it."""

    offload: Offload
    gain: float
    seconds: float
    stall_s: float

    @property
    def worth(self) -> float:
        return self.gain / self.seconds


Candidate = RecomputeChain | PricedOffload


@dataclass
class Eviction:
    """Adds recomputations and offloads to a ledger until it keeps a limit."""

    ledger: Ledger
    limit: int
    power: float = 1.0  # of `Excess`
    scheduler: CopyScheduler | None = None  # of offloads; None: no offloads
    idle_price: float = 0.1  # of an idle second of a link, in seconds
    may_stall: bool = True  # allow offloads for which kernels stall
    early_slots: int = 0  # slots by which a value may be recomputed early, from the first sweep on
    noise: Sequence[float] = ()  # by value, factor of its worth; empty: all 1
    effort: Effort = DEFAULT

    def __post_init__(self) -> None:
        self._tape, self.limit = self.ledger.tape, max(1, self.limit)
        self.evaluations = 0  # of gaps: a machine-independent measure of effort
        self._banned = set[tuple[int, int]]()  # (value, slot) that are not tried again
        self._excess = Excess(self.limit, self.power)
        self._least_nbytes = max(1, int(self.effort.least_share * self.limit))
        self._early = 0
        self._tick_s = 1e-7 * (sum(slot.seconds for slot in self._tape.slots) or 1.0)
        self._chains = Chains(self.ledger, self._excess, self._tick_s)

    def run(self) -> bool:
        """End gaps until the limit is kept; False if no candidate helps."""
        escalated = 0
        while self.excess():
            longest, early = self.effort.escalation[escalated]
            self._early = max(early, self.early_slots)
            escalated = 0 if self._sweep(longest) else escalated + 1
            if escalated == len(self.effort.escalation):
                return False
        return True

    def excess(self) -> float:
        return self._excess.of(self.ledger.load)

    def _sweep(self, longest: int) -> bool:
        """Apply candidates, best first; False if there was none."""
        weights = self._excess.of_a_byte(self.ledger.load)
        self._heap = [entry for value in range(len(self._tape.nbytes)) for entry in self._gaps(value, weights)]
        heapq.heapify(self._heap)
        taken, left = False, self.excess()
        evaluated: dict[tuple[int, int], Candidate] = {}
        while self._heap and left:
            _, value, slot = heapq.heappop(self._heap)
            self.evaluations += 1
            chain = self._chains.best(value, slot, longest)
            candidates: list[Candidate] = [] if chain is None else [chain]
            candidates += self._offloads(value, slot)
            if not candidates:
                continue
            found = max(candidates, key=lambda one: one.worth)
            worth = found.worth * self._factor(value)
            enough = self.effort.accepted_worth * -self._heap[0][0] if self._heap else 0.0
            if worth < enough and evaluated.get((value, slot)) != found:
                evaluated[value, slot] = found
                heapq.heappush(self._heap, (-worth, value, slot))
                continue
            before_s = 0.0 if self.scheduler is None else self.scheduler.links.seconds
            fresh = self._apply(found)
            now = self.excess()
            delay_s = 0.0 if self.scheduler is None else self.scheduler.links.seconds - before_s
            # it stalls longer than it was priced at, so it delays other copies
            most_s = self.effort.most_delay * found.stall_s if isinstance(found, PricedOffload) else math.inf
            if now >= left or delay_s > most_s + self._tick_s:
                self._undo(found, fresh)
                self._banned.add((value, slot))
                continue
            left, taken = now, True
            weights = self._excess.of_a_byte(self.ledger.load)
            for one in self._touched(found):
                for entry in self._gaps(one, weights):
                    heapq.heappush(self._heap, entry)
        return taken

    def _gaps(self, value: int, weights: Sequence[float]) -> Iterator[tuple[float, int, int]]:
        """Gaps of a value that span crowded slots, with an upper bound of their worth."""
        nbytes, recompute_s = self._tape.nbytes[value], self._tape.operations[self._tape.values[value].maker].seconds
        prices = [] if recompute_s is None else [recompute_s]  # of restoring the value
        if self.scheduler is not None and self.scheduler.may_offload(value):
            prices.append(self.idle_price * self.scheduler.busy_s(value))
        if nbytes < self._least_nbytes or not prices:
            return
        price = min(prices) + self._tick_s
        for slot in self.ledger.needs[value]:
            before = self.ledger.last_touch(value, slot)
            for at in range(max(before + 1, slot - self._early), slot + 1):
                weight = weights[at] - weights[min(before + 1, at)]
                if (weight or self._early) and weights[slot] > weights[before + 1] and (value, at) not in self._banned:
                    worth = max(weight, 1e-9) * nbytes / self.limit / price * self._factor(value)
                    yield -worth, value, at

    def _factor(self, value: int) -> float:
        return self.noise[value] if self.noise else 1.0

    def _offloads(self, value: int, slot: int) -> Iterator[PricedOffload]:
        if self.scheduler is None or slot not in self.ledger.needs[value]:
            return
        nbytes, load = self._tape.nbytes[value], self.ledger.load
        before = self.ledger.last_touch(value, slot)
        crowded = np.flatnonzero(load[before + 1 : slot] > self.limit) + before + 1
        if not len(crowded):
            return
        for placement in self.scheduler.placements(value, slot, (int(crowded[0]), int(crowded[-1]))):
            there = load[placement.offload.end + 1 : placement.offload.prefetch + 1]
            gain = self._excess.of(there) - self._excess.of(there - nbytes)
            if gain > 0 and (self.may_stall or placement.stall_s <= 0):
                price = placement.stall_s + self.idle_price * placement.busy_s + self._tick_s
                yield PricedOffload(placement.offload, gain, price, placement.stall_s)

    def _apply(self, found: Candidate) -> tuple[int, ...]:
        """Apply a candidate; returns the operations that did not run there before."""
        fresh: tuple[int, ...] = ()
        if isinstance(found, PricedOffload):
            self.ledger.offload(found.offload)
        else:
            fresh = tuple(op for op in found.operations if op not in self.ledger.preludes[found.slot])
            for op in fresh:
                self.ledger.recompute(op, found.slot)
        if self.scheduler is not None:
            self.scheduler.refresh()
        return fresh

    def _undo(self, found: Candidate, fresh: tuple[int, ...]) -> None:
        if isinstance(found, PricedOffload):
            self.ledger.undo_offload(found.offload)
        else:
            for op in reversed(fresh):
                self.ledger.undo_recompute(op, found.slot)
        if self.scheduler is not None:
            self.scheduler.refresh()

    def _touched(self, found: Candidate) -> Iterator[int]:
        """Values whose gaps have changed."""
        if isinstance(found, PricedOffload):
            yield found.offload.value
        else:
            for op in (self._tape.operations[number] for number in found.operations):
                yield from (*op.writes, *op.reads)


def prune(ledger: Ledger, limit: int) -> None:
    """Undo decisions that the limit does not need: the dearest recomputations, then offloads, then unused ones."""
    limit = max(limit, ledger.peak_nbytes)
    dear = sorted(ledger.recomputations(), key=lambda one: (-(ledger.tape.operations[one[0]].seconds or 0.0), one))
    for op, slot in dear:
        if ledger.is_needed(op, slot, limit):
            continue
        ledger.undo_recompute(op, slot)
        if ledger.peak_nbytes > limit:
            ledger.recompute(op, slot)
    for key in sorted(ledger.offloads):
        if key in ledger.offloads:
            undone = undo_offload(ledger, ledger.offloads[key])
            if ledger.peak_nbytes > limit:
                for offload in undone:
                    ledger.offload(offload)
    for op, slot in reversed(ledger.recomputations()):
        writes = ledger.tape.operations[op].writes
        made_here = all(ledger.version(value, slot) == (2 * slot, slot) for value in writes)
        if made_here and not any(slot in ledger.needs[value] for value in writes):
            ledger.undo_recompute(op, slot)


def undo_offload(ledger: Ledger, offload: Offload) -> list[Offload]:
    """Undo an offload, and those that prefetch from the same host buffer."""
    undone = [offload]
    if offload.start is not None:
        undone += [one for one in ledger.offloads.values() if one.value == offload.value and one.start is None]
    for one in undone:
        ledger.undo_offload(one)
    return undone
