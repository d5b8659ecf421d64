"""The chain of operations that recomputes a value before a slot, extended as long as it pays.

A chain grows source by source. Each operand of its operations is live anyway, is kept for longer, or is recomputed too:
after each operation the chain is priced, then the maker of the source that is dearest to keep is added. The best of all
priced chains removes the most excess per second.
"""

from collections.abc import Collection
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
        start = tape.values[value].maker
        if (
            slot not in ledger.needs[value]
            or start in ledger.preludes[slot]
            or ledger.version(value, slot)[0] == 2 * slot
            or not tape.may_recompute(start, slot)
        ):
            return None
        operations, best = [start], None
        while True:
            found, missing = self._priced(operations, slot)
            if found is not None and (best is None or found.worth > best.worth):
                best = found
            more = self._dearest_maker(missing, slot, operations) if len(operations) < longest else None
            if more is None:
                return best
            operations.append(more)

    def _priced(self, operations: Collection[int], slot: int) -> tuple[RecomputeChain | None, dict[int, int]]:
        """The chain of these operations, or None if it reduces nothing; and what it keeps live, see `_missing`."""
        ledger, tape = self.ledger, self.ledger.tape
        made = {one for op in operations for one in tape.operations[op].writes}
        spans, freed = [], 0  # from a slot to the chain's: bytes that are live in addition, or no longer
        for one in made:
            moment, last = ledger.version(one, slot)
            if last < slot or moment == 2 * slot:
                continue
            before = ledger.last_touch(one, slot)
            nbytes = tape.nbytes[one]
            freed += nbytes if last > slot or ledger.read_by_own_work(one, slot) else 0
            if before + 1 < slot:
                spans.append((before + 1, -nbytes))
        missing = self._missing(operations, made, slot)
        spans += ((last + 1, tape.nbytes[source]) for source, last in missing.items())
        first = min((at for at, _ in spans), default=slot)
        if first == slot:
            return None, missing
        change = np.zeros(slot - first + 1, np.int64)
        for at, nbytes in spans:
            change[at - first] += nbytes
        load = ledger.load[first:slot]
        gain = self.excess.of(load) - self.excess.of(load + np.cumsum(change)[:-1])
        if gain <= 0:
            return None, missing
        order = tuple(sorted(operations))
        kept = sum(tape.nbytes[source] for source in missing)
        gain -= self._while_running(order, made, slot, int(ledger.through[slot]) - freed + kept)
        if gain <= 0:
            return None, missing
        seconds = sum(tape.operations[op].seconds or 0.0 for op in order) + self.tick_s
        return RecomputeChain(order, slot, gain, seconds), missing

    def _missing(self, operations: Collection[int], made: set[int], slot: int) -> dict[int, int]:
        """Values that the operations read and that must be kept longer -> the last slot that needs them now."""
        found = {}
        for op in operations:
            for source in self.ledger.tape.operations[op].reads:
                if source not in made and source not in found:
                    last = self.ledger.version(source, slot)[1]
                    if last < slot:
                        found[source] = last
        return found

    def _while_running(self, order: tuple[int, ...], made: set[int], slot: int, here: int) -> float:
        """The sum of the excess while the operations run."""
        tape, ledger, more = self.ledger.tape, self.ledger, 0.0
        if here + sum(tape.nbytes[value] for value in made) <= self.excess.limit:
            return 0.0
        last_read = {value: number for number, op in enumerate(order) for value in tape.operations[op].reads}
        alive: list[int] = []
        for number, op in enumerate(tape.operations[one] for one in order):
            for value in op.writes:
                if not op.drops_dead_outputs or value in last_read or ledger.version(value, slot)[1] >= slot:
                    here += tape.nbytes[value]
                    alive.append(value)
            ended = [
                value for value in alive if ledger.version(value, slot)[1] < slot and last_read.get(value, -1) <= number
            ]
            over = sum(tape.nbytes[value] for value, sources in op.may_alias if not set(sources).isdisjoint(ended))
            more += self.excess.of_one(here - over)
            here -= sum(tape.nbytes[value] for value in ended)
            alive = [value for value in alive if value not in ended]
        return more

    def _dearest_maker(self, missing: dict[int, int], slot: int, operations: list[int]) -> int | None:
        """Of the makers that may be recomputed, the one whose source is dearest to keep."""
        ledger, tape, best = self.ledger, self.ledger.tape, None
        for source, last in missing.items():
            maker = tape.values[source].maker
            if maker in operations or not tape.may_recompute(maker, slot):
                continue
            nbytes = tape.nbytes[source]
            crowded = int(np.count_nonzero(ledger.load[last + 1 : slot] > self.excess.limit - nbytes))
            found = (nbytes * max(1, crowded), -source, maker)
            if best is None or found > best:
                best = found
        return None if best is None else best[2]
