"""The chain of operations that recomputes a value before a slot, extended as long as it pays.

A chain grows source by source. Each operand of its operations is live anyway, is kept for longer, or is recomputed too:
after each operation the chain is priced, then the maker of the source that is dearest to keep is added. The best of all
priced chains removes the most excess per second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.planning.search.ledger import Ledger


@dataclass(frozen=True)
class Excess:
    """Bytes above a limit times slots, as a share of the limit."""

    limit: int
    power: float = 1.0  # of each slot's share: 1 weighs all slots equally, more the fullest most

    def of(self, load: np.ndarray) -> float:
        """The excess of all slots, given their live bytes."""
        if self.power == 1:
            return (int(np.maximum(load, self.limit).sum()) - self.limit * len(load)) / self.limit
        return float((((np.maximum(load, self.limit) - self.limit) / self.limit) ** self.power).sum())

    def of_one(self, nbytes: int) -> float:
        """The excess of one slot with these bytes."""
        return (max(0, nbytes - self.limit) / self.limit) ** self.power

    def of_a_byte(self, load: np.ndarray) -> list[float]:
        """By slot: how much excess, times the limit, one byte less in each earlier slot would remove."""
        over = np.maximum(load - self.limit, 0) / self.limit
        weights = over > 0 if self.power == 1 else self.power * over ** (self.power - 1)
        return np.concatenate([[0.0], np.cumsum(weights)]).tolist()


@dataclass(frozen=True, slots=True)
class RecomputeChain:
    """Operations that are recomputed before a slot, the excess that this removes, and its seconds."""

    operations: tuple[int, ...]
    slot: int
    gain: float
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
        ledger, tape = self.ledger, self.ledger.tape
        more: int | None = tape.values[value].maker
        if (
            slot not in ledger.needs[value]
            or more in ledger.preludes[slot]
            or ledger.version(value, slot)[0] == 2 * slot
            or not tape.may_recompute(more, slot)
        ):
            return None
        growing, best = _Growing(ledger, slot), None
        while more is not None:
            growing.add(more)
            found = self._priced(growing)
            if found is not None and (best is None or found.worth > best.worth):
                best = found
            more = self._dearest_maker(growing) if len(growing.operations) < longest else None
        return best

    def _priced(self, chain: _Growing) -> RecomputeChain | None:
        """The chain, or None if it reduces nothing."""
        ledger, tape, slot, first = self.ledger, self.ledger.tape, chain.slot, chain.first
        if first == slot:
            return None
        load = ledger.load[first:slot]
        gain = self.excess.of(load) - self.excess.of(load + np.cumsum(chain.change[first:slot]))
        if gain <= 0:
            return None
        order = tuple(sorted(chain.operations))
        here = int(ledger.through[slot]) - chain.freed_nbytes + chain.kept_nbytes
        gain -= self._while_running(order, chain.made, slot, here)
        if gain <= 0:
            return None
        seconds = sum(tape.operations[op].seconds or 0.0 for op in order) + self.tick_s
        return RecomputeChain(order, slot, gain, seconds)

    def _while_running(self, order: tuple[int, ...], made: set[int], slot: int, here: int) -> float:
        """The sum of the excess while the operations run."""
        tape, ledger, more = self.ledger.tape, self.ledger, 0.0
        if here + sum(tape.nbytes[value] for value in made) <= self.excess.limit:
            return 0.0
        last_read = {value: number for number, op in enumerate(order) for value in tape.operations[op].reads}
        alive: list[int] = []
        for number, op in enumerate(tape.operations[one] for one in order):
            here += sum(tape.nbytes[value] for value in op.writes)
            alive += op.writes
            ended = [
                value for value in alive if ledger.version(value, slot)[1] < slot and last_read.get(value, -1) <= number
            ]
            over = sum(tape.nbytes[value] for value, sources in op.may_alias if not set(sources).isdisjoint(ended))
            more += self.excess.of_one(here - over)
            here -= sum(tape.nbytes[value] for value in ended)
            alive = [value for value in alive if value not in ended]
        return more

    def _dearest_maker(self, chain: _Growing) -> int | None:
        """Of the makers that may be recomputed, the one whose source is dearest to keep."""
        ledger, tape, best = self.ledger, self.ledger.tape, None
        for source, last in chain.missing.items():
            maker = tape.values[source].maker
            if maker in chain.operations or not tape.may_recompute(maker, chain.slot):
                continue
            nbytes = tape.nbytes[source]
            crowded = int(np.count_nonzero(ledger.load[last + 1 : chain.slot] > self.excess.limit - nbytes))
            found = (nbytes * max(1, crowded), -source, maker)
            if best is None or found > best:
                best = found
        return None if best is None else best[2]


class _Growing:
    """A chain to which operations are added, and what it changes.

    Attributes:
      operations: in the order in which they were added.
      made: values that they write.
      missing: values that they read and that must be kept longer -> the last slot that needs them now.
      change: by slot, of the bytes that are live from there until the chain's slot.
      freed_nbytes, kept_nbytes: live in the chain's slot no longer, and in addition.
    """

    def __init__(self, ledger: Ledger, slot: int) -> None:
        self._ledger, self.slot = ledger, slot
        self.operations: list[int] = []
        self.made: set[int] = set()
        self.missing: dict[int, int] = {}
        self.change = np.zeros(slot + 1, np.int64)
        self.freed_nbytes = self.kept_nbytes = 0
        self._made_first = slot

    @property
    def first(self) -> int:
        """The first slot whose bytes change."""
        return (
            min(self._made_first, *(last + 1 for last in self.missing.values())) if self.missing else self._made_first
        )

    def add(self, op: int) -> None:
        ledger, slot, operation = self._ledger, self.slot, self._ledger.tape.operations[op]
        self.operations.append(op)
        for value in operation.writes:
            nbytes = ledger.tape.nbytes[value]
            self.made.add(value)
            if (kept := self.missing.pop(value, None)) is not None:
                self.change[kept + 1] -= nbytes
                self.kept_nbytes -= nbytes
            moment, last = ledger.version(value, slot)
            if last < slot or moment == 2 * slot:
                continue
            if last > slot or ledger.read_by_own_work(value, slot):
                self.freed_nbytes += nbytes
            if (since := ledger.last_touch(value, slot) + 1) < slot:
                self.change[since] -= nbytes
                self._made_first = min(self._made_first, since)
        for source in operation.reads:
            if source in self.made or source in self.missing:
                continue
            _, last = ledger.version(source, slot)
            if last < slot:
                nbytes = ledger.tape.nbytes[source]
                self.missing[source] = last
                self.change[last + 1] += nbytes
                self.kept_nbytes += nbytes
