"""Evict until the plan fits: recompute or offload values live in crowded slots, the cheapest first.

Greedy with a price per byte, as DTR (Kirisame et al., ICLR 2021), but the whole step is known. A
*gap* is a value, the slot before which it is needed again, and the last slot before that needs it.
A chain of recomputation (`chains`) or an offload (`links`) ends a gap. Gaps wait in a heap, ordered
by their worth when last evaluated, and are evaluated again before they are ended (lazy greedy:
Minoux 1978). Decisions that the limit does not need are pruned at the end, dearest first.
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
    """An offload, with its gain and its price."""

    offload: Offload
    gain: float  # excess that this removes
    seconds: float  # price
    stall_s: float  # seconds that kernels stall for it

    @property
    def worth(self) -> float:
        return self.gain / self.seconds


Change = RecomputeChain | PricedOffload
"""A change of the plan that ends a gap."""


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
        self._tape = self.ledger.tape
        self.limit = max(1, self.limit)
        self.evaluations = 0  # of gaps: a machine-independent measure of effort
        self._banned = set[tuple[int, int]]()  # (value, slot) that are not tried again
        self._excess = Excess(self.limit, self.power)
        self._min_nbytes = max(1, int(self.effort.min_share * self.limit))
        self._early_slots = 0  # of the current sweep
        self._tick_s = 1e-7 * (sum(slot.seconds for slot in self._tape.slots) or 1.0)
        self._chains = Chains(self.ledger, self._excess, self._tick_s)

    def run(self) -> bool:
        """End gaps until the limit is kept; False if no change helps."""
        step = 0  # of the escalation
        while self.excess():
            longest, early_slots = self.effort.escalation[step]
            self._early_slots = max(early_slots, self.early_slots)
            step = 0 if self._sweep(longest) else step + 1
            if step == len(self.effort.escalation):
                return False
        return True

    def excess(self) -> float:
        return self._excess.of(self.ledger.load)

    def _sweep(self, longest: int) -> bool:
        """Apply changes, best first; False if there was none."""
        weights = self._excess.of_a_byte(self.ledger.load)
        values = range(len(self._tape.nbytes))
        self._heap = [entry for value in values for entry in self._gaps(value, weights)]
        heapq.heapify(self._heap)
        has_progress = False
        excess = self.excess()
        evaluated: dict[tuple[int, int], Change] = {}
        while self._heap and excess:
            _, value, slot = heapq.heappop(self._heap)
            self.evaluations += 1
            chain = self._chains.best(value, slot, longest)
            changes: list[Change] = [] if chain is None else [chain]
            changes += self._offloads(value, slot)
            if not changes:
                continue
            change = max(changes, key=lambda change: change.worth)
            worth = change.worth * self._factor(value)
            next_worth = -self._heap[0][0] if self._heap else 0.0
            accepted_worth = self.effort.accepted_worth * next_worth
            if worth < accepted_worth and evaluated.get((value, slot)) != change:
                evaluated[value, slot] = change
                heapq.heappush(self._heap, (-worth, value, slot))
                continue
            new_excess = self._try(change, excess)
            if new_excess is None:
                self._banned.add((value, slot))
                continue
            excess = new_excess
            has_progress = True
            weights = self._excess.of_a_byte(self.ledger.load)
            for touched in self._touched(change):
                for entry in self._gaps(touched, weights):
                    heapq.heappush(self._heap, entry)
        return has_progress

    def _try(self, change: Change, excess: float) -> float | None:
        """Apply a change; returns the new excess, or None if it does not pay and is undone."""
        before_s = self._copies_seconds()
        links = self.scheduler.links if self.scheduler else None
        added = self._apply(change)
        new_excess = self.excess()
        delay_s = self._copies_seconds() - before_s
        # an offload that stalls longer than it was priced at delays other copies
        max_delay_s = math.inf
        if isinstance(change, PricedOffload):
            max_delay_s = self.effort.max_delay * change.stall_s
        if new_excess >= excess or delay_s > max_delay_s + self._tick_s:
            self._undo(change, added)
            if self.scheduler is not None and links is not None:
                self.scheduler.links = links  # as they were, not counted again
            return None
        return new_excess

    def _copies_seconds(self) -> float:
        """Seconds of the plan with copies; 0 without offloads."""
        return 0.0 if self.scheduler is None else self.scheduler.links.seconds

    def _gaps(self, value: int, weights: Sequence[float]) -> Iterator[tuple[float, int, int]]:
        """Gaps of a value that span crowded slots, with an upper bound of their worth."""
        nbytes = self._tape.nbytes[value]
        recompute_s = self._tape.operations[self._tape.values[value].maker].seconds
        prices_s = [] if recompute_s is None else [recompute_s]  # of restoring the value
        if self.scheduler is not None and self.scheduler.may_offload(value):
            prices_s.append(self.idle_price * self.scheduler.busy_s(value))
        if nbytes < self._min_nbytes or not prices_s:
            return
        price_s = min(prices_s) + self._tick_s
        for need in self.ledger.needs[value]:
            begin = self.ledger.last_touch(value, need) + 1
            if weights[need] <= weights[begin]:
                continue
            for slot in range(max(begin, need - self._early_slots), need + 1):
                weight = weights[slot] - weights[min(begin, slot)]
                if (weight or self._early_slots) and (value, slot) not in self._banned:
                    gain = max(weight, 1e-9) * nbytes / self.limit
                    yield -(gain / price_s * self._factor(value)), value, slot

    def _factor(self, value: int) -> float:
        return self.noise[value] if self.noise else 1.0

    def _offloads(self, value: int, slot: int) -> Iterator[PricedOffload]:
        if self.scheduler is None or slot not in self.ledger.needs[value]:
            return
        nbytes = self._tape.nbytes[value]
        load = self.ledger.load
        begin = self.ledger.last_touch(value, slot) + 1
        crowded = np.flatnonzero(load[begin:slot] > self.limit) + begin
        if not len(crowded):
            return
        span = int(crowded[0]), int(crowded[-1])
        for placement in self.scheduler.placements(value, slot, span):
            freed = load[placement.offload.end + 1 : placement.offload.prefetch + 1]
            gain = self._excess.of(freed) - self._excess.of(freed - nbytes)
            if gain > 0 and (self.may_stall or placement.stall_s <= 0):
                price_s = placement.stall_s + self.idle_price * placement.busy_s + self._tick_s
                yield PricedOffload(placement.offload, gain, price_s, placement.stall_s)

    def _apply(self, change: Change) -> tuple[int, ...]:
        """Apply a change; returns the operations that did not run there before."""
        added: tuple[int, ...] = ()
        if isinstance(change, PricedOffload):
            self.ledger.offload(change.offload)
        else:
            prelude = self.ledger.preludes[change.slot]
            added = tuple(op for op in change.operations if op not in prelude)
            for op in added:
                self.ledger.recompute(op, change.slot)
        if self.scheduler is not None:
            self.scheduler.refresh()
        return added

    def _undo(self, change: Change, added: tuple[int, ...]) -> None:
        if isinstance(change, PricedOffload):
            self.ledger.undo_offload(change.offload)
        else:
            for op in reversed(added):
                self.ledger.undo_recompute(op, change.slot)

    def _touched(self, change: Change) -> Iterator[int]:
        """Values whose gaps have changed."""
        if isinstance(change, PricedOffload):
            yield change.offload.value
        else:
            for op in (self._tape.operations[number] for number in change.operations):
                yield from (*op.writes, *op.reads)


def prune(ledger: Ledger, limit: int) -> None:
    """Undo decisions that the limit does not need.

    First the dearest recomputations, then offloads, then recomputations that nothing reads.
    """
    limit = max(limit, ledger.peak_nbytes)
    operations = ledger.tape.operations
    recomputations = ledger.recomputations()
    dearest_first = [(-(operations[op].seconds or 0.0), op, slot) for op, slot in recomputations]
    for _, op, slot in sorted(dearest_first):
        if not ledger.is_needed(op, slot, limit):
            ledger.undo_within(op, slot, limit)
    for key in sorted(ledger.offloads):
        if key in ledger.offloads:
            undone = undo_offload(ledger, ledger.offloads[key])
            if ledger.peak_nbytes > limit:
                for offload in undone:
                    ledger.offload(offload)
    for op, slot in reversed(ledger.recomputations()):
        writes = operations[op].writes
        ends_here = all(ledger.version(value, slot) == (2 * slot, slot) for value in writes)
        if ends_here and not any(slot in ledger.needs[value] for value in writes):
            ledger.undo_recompute(op, slot)


def undo_offload(ledger: Ledger, offload: Offload) -> list[Offload]:
    """Undo an offload, and those that prefetch from the same host buffer."""
    undone = [offload]
    if offload.start is not None:
        for dependent in ledger.offloads.values():
            if dependent.value == offload.value and dependent.start is None:
                undone.append(dependent)
    for dependent in undone:
        ledger.undo_offload(dependent)
    return undone
