"""The chain of operations that recomputes a value before a slot, extended as long as it pays.

A chain grows source by source. Each operand of its operations is live anyway, is kept for longer,
or is recomputed too: after each operation the chain is priced, then the maker of the source that is
dearest to keep is added. The best of all priced chains removes the most excess per second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.planning.search.ledger import Ledger

type _KeepPrice = tuple[int, int, int]
"""Bytes times crowded slots to keep a source, the source's negative number, its maker."""


@dataclass(frozen=True)
class Excess:
    """Bytes above a limit times slots, as a share of the limit."""

    limit: int
    power: float = 1.0  # of each slot's share: 1 weighs all slots equally, more the fullest most

    def of(self, load: np.ndarray) -> float:
        """The excess of all slots, given their live bytes."""
        clipped = np.maximum(load, self.limit)
        if self.power == 1:
            return (int(clipped.sum()) - self.limit * len(load)) / self.limit
        return float((((clipped - self.limit) / self.limit) ** self.power).sum())

    def of_slot(self, nbytes: int) -> float:
        """The excess of one slot with these bytes."""
        return (max(0, nbytes - self.limit) / self.limit) ** self.power

    def of_a_byte(self, load: np.ndarray) -> list[float]:
        """By slot: excess, times the limit, that one byte less in each earlier slot removes."""
        over = np.maximum(load - self.limit, 0) / self.limit
        weights = over > 0 if self.power == 1 else self.power * over ** (self.power - 1)
        return np.concatenate([[0.0], np.cumsum(weights)]).tolist()


@dataclass(frozen=True, slots=True)
class RecomputeChain:
    """Operations that are recomputed before a slot."""

    operations: tuple[int, ...]
    slot: int
    gain: float  # excess that this removes
    seconds: float

    @property
    def worth(self) -> float:
        return self.gain / self.seconds


@dataclass(frozen=True)
class Chains:
    """Chains that could be added to the plan of a ledger."""

    ledger: Ledger
    excess: Excess
    tick_s: float  # added to the seconds of every chain, so that none is free

    def best(self, value: int, slot: int, longest: int) -> RecomputeChain | None:
        """The best chain to recompute a value before a slot, or None if none reduces the excess."""
        ledger = self.ledger
        maker: int | None = ledger.tape.values[value].maker
        if (
            slot not in ledger.needs[value]
            or maker in ledger.preludes[slot]
            or ledger.version(value, slot)[0] == 2 * slot
            or not ledger.tape.may_recompute(maker, slot)
        ):
            return None
        builder = _ChainBuilder(ledger, slot)
        best = None
        while maker is not None:
            builder.add(maker)
            chain = self._priced(builder)
            if chain is not None and (best is None or chain.worth > best.worth):
                best = chain
            maker = self._dearest_maker(builder) if len(builder.operations) < longest else None
        return best

    def _priced(self, builder: _ChainBuilder) -> RecomputeChain | None:
        """The chain, or None if it does not reduce the excess."""
        ledger = self.ledger
        slot = builder.slot
        first = builder.first
        if first == slot:
            return None
        load = ledger.load[first:slot]
        change = np.cumsum(builder.change[first:slot])
        gain = self.excess.of(load) - self.excess.of(load + change)
        if gain <= 0:
            return None
        order = tuple(sorted(builder.operations))
        live_nbytes = int(ledger.throughout_nbytes[slot])
        live_nbytes += builder.kept_nbytes - builder.freed_nbytes
        gain -= self._excess_of_running(order, builder.recomputed, slot, live_nbytes)
        if gain <= 0:
            return None
        operations = ledger.tape.operations
        seconds = sum(operations[op].seconds or 0.0 for op in order) + self.tick_s
        return RecomputeChain(order, slot, gain, seconds)

    def _excess_of_running(
        self,
        order: tuple[int, ...],
        recomputed: set[int],
        slot: int,
        live_nbytes: int,
    ) -> float:
        """The sum of the excess while the operations run."""
        tape = self.ledger.tape
        nbytes = tape.nbytes
        if live_nbytes + sum(nbytes[value] for value in recomputed) <= self.excess.limit:
            return 0.0
        operations = [tape.operations[op] for op in order]
        last_read = {value: number for number, op in enumerate(operations) for value in op.reads}
        excess = 0.0
        alive: list[int] = []
        for number, op in enumerate(operations):
            live_nbytes += sum(nbytes[value] for value in op.writes)
            alive += op.writes
            ended = [
                value
                for value in alive
                if self.ledger.version(value, slot)[1] < slot and last_read.get(value, -1) <= number
            ]
            aliased = (v for v, sources in op.may_alias if not set(sources).isdisjoint(ended))
            excess += self.excess.of_slot(live_nbytes - sum(nbytes[value] for value in aliased))
            live_nbytes -= sum(nbytes[value] for value in ended)
            alive = [value for value in alive if value not in ended]
        return excess

    def _dearest_maker(self, builder: _ChainBuilder) -> int | None:
        """Of the makers that may be recomputed, the one whose source is dearest to keep."""
        prices = (builder.keep_price(source, self.excess.limit) for source in builder.missing)
        dearest = max(
            (price for price in prices if price and price[2] not in builder.operations),
            default=None,
        )
        return None if dearest is None else dearest[2]


class _ChainBuilder:
    """A chain to which operations are added, and the changes that it makes.

    Attributes:
      operations: in the order in which they were added.
      recomputed: values that they write.
      missing: values that they read and that must be kept longer -> the last slot that needs them
        without the chain.
      change: by slot, of the bytes that are live from there until the chain's slot.
      freed_nbytes, kept_nbytes: live in the chain's slot no longer, and in addition.
    """

    def __init__(self, ledger: Ledger, slot: int) -> None:
        self._ledger = ledger
        self.slot = slot
        self.operations: list[int] = []
        self.recomputed: set[int] = set()
        self.missing: dict[int, int] = {}
        self.change = np.zeros(slot + 1, np.int64)
        self.freed_nbytes = self.kept_nbytes = 0
        self._first_freed = slot  # the first slot in which a recomputed value is free
        self._keep_prices: dict[int, _KeepPrice | None] = {}  # by source

    @property
    def first(self) -> int:
        """The first slot whose bytes change."""
        return min(self._first_freed, *(last + 1 for last in self.missing.values()), self.slot)

    def add(self, op: int) -> None:
        operation = self._ledger.tape.operations[op]
        self.operations.append(op)
        for value in operation.writes:
            self._add_written(value)
        for source in operation.reads:
            if source not in self.recomputed and source not in self.missing:
                self._add_source(source)

    def _add_written(self, value: int) -> None:
        ledger = self._ledger
        slot = self.slot
        nbytes = ledger.tape.nbytes[value]
        self.recomputed.add(value)
        if (kept_since := self.missing.pop(value, None)) is not None:
            self.change[kept_since + 1] -= nbytes
            self.kept_nbytes -= nbytes
        moment, last = ledger.version(value, slot)
        if last < slot or moment == 2 * slot:
            return
        if last > slot or ledger.read_by_own_work(value, slot):
            self.freed_nbytes += nbytes
        free_since = ledger.last_touch(value, slot) + 1
        if free_since < slot:
            self.change[free_since] -= nbytes
            self._first_freed = min(self._first_freed, free_since)

    def keep_price(self, source: int, limit: int) -> _KeepPrice | None:
        """The price of keeping a missing source; None if its maker may not be recomputed.

        It does not change while the chain grows.
        """
        if source not in self._keep_prices:
            ledger = self._ledger
            maker = ledger.tape.values[source].maker
            price = None
            if ledger.tape.may_recompute(maker, self.slot):
                nbytes = ledger.tape.nbytes[source]
                gap = ledger.load[self.missing[source] + 1 : self.slot]
                crowded = int(np.count_nonzero(gap > limit - nbytes))
                price = nbytes * max(1, crowded), -source, maker
            self._keep_prices[source] = price
        return self._keep_prices[source]

    def _add_source(self, source: int) -> None:
        _, last = self._ledger.version(source, self.slot)
        if last < self.slot:
            nbytes = self._ledger.tape.nbytes[source]
            self.missing[source] = last
            self.change[last + 1] += nbytes
            self.kept_nbytes += nbytes
