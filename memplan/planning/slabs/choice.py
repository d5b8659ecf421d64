"""Which values loops over slabs store for later loops, and where: the choice of least time within both budgets.

Round by round: minimum cuts (`cut`) decide what is stored, the free bytes of the loops decide where, and the streams of
every loop (`price`) decide what a second of its kernels is worth in seconds of copies. The best choice is then changed
value by value, and by two large values at once.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.planning.slabs.cut import SlabCut
from memplan.planning.slabs.price import Price, Pricer, SlabLimits
from memplan.planning.slabs.slabs import Slabs

_ROUNDS = 6
_WORTHS = (0.3, 0.1, 0.03, 0.01)  # a second of kernels in seconds of copies, if memory is the bottleneck
# The same if nothing fits even with nothing stored, since recomputation needs rows around a slab of all operands: a
# U-Net at 32^3 on an A100 needs 12.5 MiB with nothing stored, 5.8 MiB at a worth of 10, 6.1 MiB at 1000.
_WORTHS_OF_ROWS = (1.0, 10.0, 100.0, 1000.0)
_CHANGES = 2500  # tried from one choice at most: no U-Net needs as many; with 200 loops they take 25 s
_PAIRS = 1200  # tried at most: half a second of the choice of a U-Net, 3.88 instead of 4.08 s at 304^3
_LARGE = 8  # values above this fraction (1/_LARGE) of the largest value are changed in pairs
_STEP = 0.5  # exponent with which a loop's weight follows the ratio of its kernels and copies


@dataclass(frozen=True)
class Choice:
    """Choices for one axis, one set of ops and one number of rows (`bare`)."""

    pricer: Pricer
    bare: Slabs
    limits: SlabLimits

    def best(self) -> tuple[Slabs, Price]:
        """The fastest choice that fits, or the smallest."""
        return self._best(self._tried)

    @cached_property
    def _tried(self) -> Sequence[tuple[Slabs, Price]]:
        """The first choice, and others that follow from it."""
        first = next(rounds := self._rounds())
        return [first, *(rounds if self.limits.fits(first[1]) else self._recompute_everything_first())]

    def _best(self, found: Iterable[tuple[Slabs, Price]]) -> tuple[Slabs, Price]:
        return min(found, key=lambda one: self.limits.order(one[1]))

    def _priced(self, slabs: Slabs) -> tuple[Slabs, Price]:
        return slabs, self.pricer.price(slabs, self.limits)

    def _better(self, best: tuple[Slabs, Price], others: Iterable[Slabs]) -> tuple[Slabs, Price]:
        """The best of a choice and others; the bytes of what is slower than a choice that fits are not counted."""
        for slabs in others:
            most_seconds = best[1].seconds if self.limits.fits(best[1]) else math.inf
            price = self.pricer.price_below(slabs, self.limits, most_seconds)
            if price and self.limits.order(price) < self.limits.order(best[1]):
                best = slabs, price
        return best

    def refined(self, slabs: Slabs) -> tuple[Slabs, Price]:
        """The best choice reached by changing single values of `slabs`, or of the first choice, which stores most."""
        return self._best(self.descended(one) for one in dict.fromkeys((slabs, self._tried[0][0])))

    def paired(self, slabs: Slabs) -> tuple[Slabs, Price]:
        """The best choice reached by changing two large values at once, each improvement refined by `descended`.

        The first change frees bytes, or makes a loop wait for its copies; the second makes up for it.
        """
        best, pairs = self._priced(slabs), self._pairs(slabs)
        for _ in range(_PAIRS):
            if (other := next(pairs, None)) is None:
                break
            if self._better(best, [other]) is not best:
                best = self.descended(other)
                pairs = self._pairs(best[0])
        return best

    def _pairs(self, slabs: Slabs) -> Iterator[Slabs]:
        """Slabs with a large stored value changed, and then another large value."""
        values, nbytes = self._worth_writing(slabs), self.pricer.graph.graph.nbytes
        large = max(map(nbytes, values), default=0) // _LARGE
        values = [value for value in values if nbytes(value) > large]
        for first in (value for value in values if value in slabs.stored):
            for changed in self._neighbours(slabs, first):
                for second in values:
                    if second != first:
                        yield from self._neighbours(changed, second)

    def descended(self, slabs: Slabs) -> tuple[Slabs, Price]:
        """The slabs after changing one value after another, until no change makes them faster."""
        best, left = self._priced(slabs), _CHANGES
        tried: Price | None = None
        while tried != best[1] and left > 0:
            tried = best[1]
            for value in self._worth_writing(best[0]):
                others = [*self._neighbours(best[0], value)] if left > 0 else []
                left -= len(others)
                best = self._better(best, others)
            # a loop recomputes a value that it reads now, or reads one that it recomputes
            walls, (now, _) = self.pricer.walls, best
            written = now.stored | walls.forced
            pairs = {(value, loop.level) for loop in walls.loops(now) for value in loop.reads if value in written}
            toggled = (
                replace(now, recomputed_in=now.recomputed_in ^ {one}) for one in sorted(pairs | now.recomputed_in)
            )
            best = self._better(best, toggled)
        return best

    def _neighbours(self, slabs: Slabs, value: int) -> Iterator[Slabs]:
        """Slabs with one value stored or not, first with all placed again, then with only that value changed.

        Alone it is not stored, stored on the host, or stored on the device for its first readers.
        """
        yield self._placed(slabs, slabs.stored ^ {value})
        again = frozenset(one for one in slabs.recomputed_in if one[0] != value)
        away = replace(slabs, stored=slabs.stored - {value}, on_host=slabs.on_host - {value}, recomputed_in=again)
        yield away
        there = replace(away, stored=away.stored | {value})
        yield replace(there, on_host=there.on_host | {value})
        yield there
        levels = [loop.level for loop in self.pricer.walls.loops(there) if value in loop.reads]
        for first in range(1, len(levels)):
            yield replace(there, recomputed_in=again | {(value, level) for level in levels[first:]})

    def _worth_writing(self, slabs: Slabs) -> list[int]:
        """Values that are stored or that kernels write by slabs, the last first: earlier loops write for it."""
        graph, along = self.pricer.graph.graph, self.pricer.graph.along
        kernels = (op for op in self.bare.ops if graph.ops[op].fusion == "kernel" and not along[op].reduces)
        made = {value for op in kernels for value in graph.ops[op].outputs}
        return sorted((made | slabs.stored) - self.pricer.walls.forced, reverse=True)

    def _recompute_everything_first(self) -> Iterator[tuple[Slabs, Price]]:
        """Recompute all values that can be, however long that takes; then fewer and fewer, until they do not fit."""
        least = self._at_worth(0.0)
        yield least
        for worth in _WORTHS if self.limits.fits(least[1]) else _WORTHS_OF_ROWS:
            yield (found := self._at_worth(worth))
            if self.limits.fits(found[1]):
                return

    def _at_worth(self, worth: float) -> tuple[Slabs, Price]:
        weights = dict.fromkeys(self.pricer.walls.levels.values(), worth)
        return self._priced(self._placed(self.bare, frozenset(SlabCut(self.pricer, weights, {}, (), math.inf).run())))

    def _rounds(self) -> Iterator[tuple[Slabs, Price]]:
        weights: dict[int, float] = {}
        shares: Mapping[int, int] = {}
        on_device: Collection[int] = ()
        for _ in range(_ROUNDS):
            shares = SlabCut(self.pricer, weights, shares, on_device).run()
            slabs = self._placed(self.bare, frozenset(shares))
            yield self._priced(slabs)
            on_device = slabs.stored - slabs.on_host
            for loop in self.pricer.walls.loops(slabs):
                # the weight of a loop's kernels rises if it waits for them, and falls if it waits for copies
                streams = self.pricer.streams(loop, slabs)
                if (copies := max(streams.read, streams.written)) and streams.kernels:
                    weights[loop.level] = weights.get(loop.level, 1.0) * (streams.kernels / copies) ** _STEP

    def _placed(self, slabs: Slabs, stored: frozenset[int]) -> Slabs:
        """The slabs with these values stored: on the device as far as they fit there, the most copied first.

        Values that are read whole must be on the device then, and stay there.
        """
        pricer, nbytes, read_whole = self.pricer, self.pricer.graph.graph.nbytes, self.pricer.read_whole
        loops = pricer.walls.loops(replace(slabs, stored=stored))
        lives = pricer.lifetimes(loops)
        slabs = replace(slabs, stored=stored, on_host=frozenset(lives))
        room = self.limits.device_bytes - self.limits.resident_bytes
        beside = zip(loops, pricer.outside.beside(loops), strict=True)
        free = [room - more - pricer.trip_bytes(loop, slabs) for loop, more in beside]
        for value, life in pricer.relayouts(loops).items():
            for loop in range(*life):
                free[loop] -= nbytes(value)

        def order(value: int) -> tuple[bool, float]:
            """Sort values read whole first, then those with the most copies per loop of their lifetime."""
            first, end = lives[value]
            return value not in read_whole, -(1 + sum(value in loop.reads for loop in loops[first:end])) / (end - first)

        on_host = set(lives)
        for value in sorted(lives, key=order):
            there = range(*lives[value])
            if value in read_whole or all(free[loop] >= nbytes(value) for loop in there):
                on_host.discard(value)
                for loop in there:
                    free[loop] -= nbytes(value)
        return replace(slabs, on_host=frozenset(on_host))
