"""The values that loops over slabs store for later loops, and their memories.

The choice takes the least time within both budgets. Round by round, minimum cuts (`cut`) decide
which values are stored, the free bytes of the loops decide where, and the streams of every loop
(`price`) decide the worth of a second of its kernels in seconds of copies. The best choice is then
changed value by value, and by two large values at once.
"""

import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.planning.slabs.cut import SlabCuts
from memplan.planning.slabs.price import Price, Pricer, SlabLimits
from memplan.planning.slabs.slabs import MOST_ELEMENTS, Slabs, wide_levels

PricedSlabs = tuple[Slabs, Price]

_ROUNDS = 6
# A second of kernels in seconds of copies, if memory is the bottleneck.
_WORTHS = (0.3, 0.1, 0.03, 0.01)
# The same if nothing fits even with nothing stored: recomputation needs rows around a slab of all
# operands. A U-Net at 32^3 on an A100 needs 12.5 MiB with nothing stored, 5.8 MiB at a worth of 10,
# 6.1 MiB at 1000.
_WORTHS_OF_ROWS = (1.0, 10.0, 100.0, 1000.0)
# Limit of the changes that one descent tries. No U-Net needs as many; with 200 loops they take
# 25 s.
_CHANGES = 2500
# Limit of the pairs that are tried. They take half a second of the choice of a U-Net: 3.88 instead
# of 4.08 s at 304^3.
_PAIRS = 1200
# Keep a value on the device by quarters. Arrays of any size leave holes in XLA's heap: a residual
# U-Net of 384^3 in 15 GiB missed by 3 to 13 % with shares by rows, three times, and fits with
# quarters. By eighths, of six U-Nets two take 4 and 6 % longer, one 7 % less, three within 2 %.
_SHARES = 4
# Perturb a choice so often, a twentieth and an eighth of its values in turn. With 16 times of
# either, seven steps on a V100 and an A100 take 0 to 8 % less than with none, by estimate: a
# ResNet-50 of batch 1,920 5 % for 16 s, five of six U-Nets 0.3 to 6 % for 1 to 5 s.
_RESTARTS = 10
_PERTURBED_PARTS = (20, 8)
# At most so many slabs in one trip: each is a slice of its own of what an earlier loop stacked. A
# block of a Pairformer of 6,000 residues takes 229 s with one at a time, 34.9 with 16, 28.5 with
# 32, 25.3 with 64 and with 128, by estimate.
MOST_AT_ONCE = 64
_LARGE = 8  # values above this fraction (1/_LARGE) of the largest value are changed in pairs
_STEP = 0.5  # exponent with which a loop's weight follows the ratio of its kernels and copies


@dataclass(frozen=True)
class Choice:
    """Choices for one axis, one set of ops and one number of rows (`bare`)."""

    cuts: SlabCuts
    bare: Slabs
    limits: SlabLimits

    @property
    def pricer(self) -> Pricer:
        return self.cuts.pricer

    def best(self) -> PricedSlabs:
        """The fastest choice that fits, or the smallest."""
        return self._best(self._starts)

    def fastest(self) -> PricedSlabs | None:
        """The fastest choice that fits.

        None, without a search for it, if neither the choice of the first round nor the one that
        stores least fits.
        """
        may_fit = any(self.limits.fits(price) for _, price in (self._first, self._smallest))
        return self._best(self._starts) if may_fit else None

    @cached_property
    def _first(self) -> PricedSlabs:
        """The choice of the first round, which stores most."""
        return next(self._rounds)

    @cached_property
    def _smallest(self) -> PricedSlabs:
        """The choice that recomputes all values that can be."""
        return self._at_worth(0.0)

    @cached_property
    def _starts(self) -> Sequence[PricedSlabs]:
        """The choice of the first round, and further choices.

        They are those of the next rounds if the first fits, else those that recompute most.
        """
        if self.limits.fits(self._first[1]):
            return [self._first, *self._rounds]
        return [self._first, *self._recompute_everything_first()]

    def _best(self, choices: Iterable[PricedSlabs]) -> PricedSlabs:
        return min(choices, key=lambda choice: self.limits.order(choice[1]))

    def _priced(self, slabs: Slabs) -> PricedSlabs:
        return slabs, self.pricer.price(slabs, self.limits)

    def _better(self, best: PricedSlabs, candidates: Iterable[Slabs]) -> PricedSlabs:
        """The best of a choice and candidates.

        Bytes are not counted for candidates that are slower than a choice that fits.
        """
        for slabs in candidates:
            bound_s = best[1].seconds if self.limits.fits(best[1]) else math.inf
            price = self.pricer.price_below(slabs, self.limits, bound_s)
            if price and self.limits.order(price) < self.limits.order(best[1]):
                best = slabs, price
                self.pricer.walls.compare_with(slabs)
        return best

    def refined(self, slabs: Slabs) -> PricedSlabs:
        """The best choice reached by changing single values.

        Starts from `slabs` and from the first choice, which stores most.
        """
        starts = dict.fromkeys((slabs, self._first[0]))
        return self._best(self.descended(start) for start in starts)

    def paired(self, slabs: Slabs) -> PricedSlabs:
        """The best choice reached by changing two large values at once.

        The first change frees bytes, or makes a loop wait for its copies; the second makes up for
        it. `descended` refines each improvement.
        """
        best = self._priced(slabs)
        pairs = self._pairs(slabs)
        for _ in range(_PAIRS):
            candidate = next(pairs, None)
            if candidate is None:
                break
            if self._better(best, [candidate]) is not best:
                best = self.descended(candidate)
                pairs = self._pairs(best[0])
        return best

    def perturbed(self, slabs: Slabs) -> PricedSlabs:
        """The best choice reached by changing several values at once, again and again.

        Each time, `descended` refines the best with another few values changed. They are drawn from
        the same numbers in every process.
        """
        draw = random.Random(0)
        best = self._priced(slabs)
        for restart in range(_RESTARTS):
            values = self._worth_writing(best[0])
            count = max(2, len(values) // _PERTURBED_PARTS[restart % len(_PERTURBED_PARTS)])
            changed = draw.sample(values, min(count, len(values)))
            start = self._placed(best[0], best[0].stored ^ frozenset(changed))
            concerned = self._concerned(best[0], start) | set(changed)
            best = self._best([best, self.descended(start, concerned)])
        return best

    def widened(self, slabs: Slabs) -> PricedSlabs:
        """The slabs with twice as many at once in single loops, again and again.

        A trip reads and writes the sums so far: the fewer, the faster. Whatever else changes the
        slabs comes before.
        """
        best = self._priced(slabs)
        walls = self.pricer.walls
        for level in sorted(wide_levels(slabs, walls.loops(slabs))):
            count = 2
            while count <= MOST_AT_ONCE:
                at_once = {**best[0].slabs_at_once, level: count}
                wider = replace(best[0], at_once=frozenset(at_once.items()))
                loop = walls.arranged(wider).entries[level].loop
                assert loop is not None
                if loop.largest_elements(self.pricer.graph) >= MOST_ELEMENTS:
                    break
                better = self._better(best, [wider])
                if better is best:
                    break
                best = better
                count *= 2
        return best

    def _pairs(self, slabs: Slabs) -> Iterator[Slabs]:
        """Slabs with a large stored value changed, and then another large value."""
        values = self._worth_writing(slabs)
        nbytes = self.pricer.graph.graph.nbytes
        large_nbytes = max(map(nbytes, values), default=0) // _LARGE
        values = [value for value in values if nbytes(value) > large_nbytes]
        for first in (value for value in values if value in slabs.stored):
            for changed in self._moved(slabs, first):
                for second in values:
                    if second != first:
                        yield from self._moved(changed, second)

    def descended(self, slabs: Slabs, values: Collection[int] | None = None) -> PricedSlabs:
        """The slabs after changing one value after another, until no change makes them faster.

        A value is tried again only once a loop has changed for which it matters.

        Args:
          values: those tried first; None: all.
        """
        walls = self.pricer.walls
        best = self._priced(slabs)
        walls.compare_with(slabs)
        changes = _CHANGES
        pending = self._worth_changing(slabs) if values is None else {*values}
        while pending and changes > 0:
            # The order is that of `cut`: later loops' reads decide the writes of earlier loops.
            for value in sorted(pending, reverse=True):
                if changes <= 0:
                    break
                pending.discard(value)
                neighbours = [*self._neighbours(best[0], value)]
                changes -= len(neighbours)
                better = self._better(best, neighbours)
                if better is not best:
                    pending |= self._concerned(best[0], better[0])
                    best = better
        return best

    def _concerned(self, slabs: Slabs, changed: Slabs) -> set[int]:
        """The values that matter for loops in which two slabs differ."""
        return self.pricer.walls.concerned(slabs, changed) & self._worth_changing(changed)

    def _neighbours(self, slabs: Slabs, value: int) -> Iterator[Slabs]:
        """Slabs with one value stored or not, or recomputed by one loop more or less."""
        if value not in self.pricer.walls.forced:
            yield from self._moved(slabs, value)
        yield from self._toggled(slabs, value)

    def _moved(self, slabs: Slabs, value: int) -> Iterator[Slabs]:
        """Slabs with one value stored or not.

        First with the memories of all values chosen again, then with only that value changed: not
        stored, stored on the host, or stored on the device for its first readers.
        """
        yield self._placed(slabs, slabs.stored ^ {value})
        without = slabs.without(value)
        yield without
        on_device = replace(without, stored=without.stored | {value})
        yield replace(on_device, on_host=on_device.on_host | {value})
        yield on_device
        loops = self.pricer.walls.loops(on_device)
        levels = [loop.level for loop in loops if value in loop.reads]
        for first in range(1, len(levels)):
            later = {(value, level) for level in levels[first:]}
            yield replace(on_device, recomputed_in=on_device.recomputed_in | later)

    def _toggled(self, slabs: Slabs, value: int) -> Iterator[Slabs]:
        """Slabs in which one loop recomputes a written value instead of reading it, or reverse."""
        walls = self.pricer.walls
        levels = {level for recomputed, level in slabs.recomputed_in if recomputed == value}
        if value in slabs.stored or value in walls.forced:
            levels |= {loop.level for loop in walls.loops(slabs) if value in loop.reads}
        for level in sorted(levels):
            yield replace(slabs, recomputed_in=slabs.recomputed_in ^ {(value, level)})

    def _worth_changing(self, slabs: Slabs) -> set[int]:
        """Values that are written, or that kernels make by slabs."""
        return {*slabs.stored, *self._kernel_outputs, *self.pricer.walls.forced}

    def _worth_writing(self, slabs: Slabs) -> list[int]:
        """Those that need not be written, the last first."""
        return sorted(self._worth_changing(slabs) - self.pricer.walls.forced, reverse=True)

    @cached_property
    def _kernel_outputs(self) -> frozenset[int]:
        """Values that kernels make by slabs."""
        graph = self.pricer.graph
        kernels = (op for op in self.bare.ops if graph.graph.ops[op].fusion == "kernel")
        outputs = (graph.graph.ops[op].outputs for op in kernels if not graph.along[op].reduces)
        return frozenset(itertools.chain.from_iterable(outputs))

    def _recompute_everything_first(self) -> Iterator[PricedSlabs]:
        """First recompute all values that can be, then fewer, until no choice fits."""
        yield self._smallest
        for worth in _WORTHS if self.limits.fits(self._smallest[1]) else _WORTHS_OF_ROWS:
            choice = self._at_worth(worth)
            yield choice
            if self.limits.fits(choice[1]):
                return

    def _at_worth(self, worth: float) -> PricedSlabs:
        weights = dict.fromkeys(self.pricer.walls.levels.values(), worth)
        stored = self.cuts.readers(weights, {}, (), math.inf)
        return self._priced(self._placed(self.bare, frozenset(stored)))

    @cached_property
    def _rounds(self) -> Iterator[PricedSlabs]:
        """The choices of all rounds, each made once: `_first`, then those in `_starts`."""
        return self._round_by_round()

    def _round_by_round(self) -> Iterator[PricedSlabs]:
        weights: dict[int, float] = {}
        shares: Mapping[int, int] = {}
        on_device: Collection[int] = ()
        for _ in range(_ROUNDS):
            shares = self.cuts.readers(weights, shares, on_device)
            slabs = self._placed(self.bare, frozenset(shares))
            yield self._priced(slabs)
            on_device = slabs.stored - slabs.on_host
            for loop in self.pricer.walls.loops(slabs):
                # the weight of a loop's kernels rises if it waits for them, and falls if it waits
                # for copies
                streams = self.pricer.streams(loop, slabs)
                copies_s = max(streams.read, streams.written)
                if copies_s and streams.kernels:
                    ratio = streams.kernels / copies_s
                    weights[loop.level] = weights.get(loop.level, 1.0) * ratio**_STEP

    def _placed(self, slabs: Slabs, stored: frozenset[int]) -> Slabs:
        """The slabs with these values stored, on the device as far as they fit there.

        The most copied values come first. Values that are read whole must be on the device then,
        and stay there. Of those for which not all bytes are left, some rows are on the device.
        """
        pricer = self.pricer
        nbytes = pricer.graph.graph.nbytes
        read_whole = pricer.lifetimes.read_whole
        slabs = replace(slabs, stored=stored)
        arranged = pricer.walls.arranged(slabs)
        occupancy = pricer.lifetimes.occupancy(arranged, slabs)
        lifetimes = {
            value: lifetime for value, lifetime in occupancy.lifetimes.items() if lifetime.is_stored
        }
        available = self.limits.device_bytes - self.limits.resident_bytes
        free = available - occupancy.around - pricer.trip_nbytes(arranged, slabs)  # by level
        loops_before = list(
            itertools.accumulate((entry.loop is not None for entry in arranged.entries), initial=0)
        )

        def order(value: int) -> tuple[bool, float, int, int]:
            """Values read whole first, then those with the most copies per loop of a lifetime."""
            lifetime = lifetimes[value]
            loops = loops_before[lifetime.end] - loops_before[lifetime.first]
            return value not in read_whole, -(1 + lifetime.reads) / loops, lifetime.first, value

        on_host = list[int]()
        for value in sorted(lifetimes, key=order):
            during = free[lifetimes[value].first : lifetimes[value].end]
            if value in read_whole or during.min() >= nbytes(value):
                during -= nbytes(value)
            else:
                on_host.append(value)
        on_device = set[tuple[int, int]]()
        for value in on_host:
            during = free[lifetimes[value].first : lifetimes[value].end]
            if during.min() <= 0:
                continue
            rows = pricer.walls.rows(slabs, value)
            shares = int(_SHARES * during.min() / nbytes(value))
            device_rows = rows * shares // _SHARES
            if device_rows > 0:
                on_device.add((value, device_rows))
                during -= -(-nbytes(value) * device_rows // rows)
        return replace(slabs, on_host=frozenset(on_host), on_device=frozenset(on_device))
