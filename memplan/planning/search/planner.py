"""A problem and a budget -> the schedule that keeps the budget and takes the least time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.packing import live_nbytes, needed, pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, Kind, Schedule, runs
from memplan.planning.search.evict import Eviction, take_back
from memplan.planning.search.ledger import Copy, Ledger
from memplan.planning.search.links import Offers, events
from memplan.planning.search.reorder import reorder
from memplan.planning.search.repair import Repair
from memplan.planning.search.tape import Taped, settled, tape_of
from memplan.planning.timing import CopySeconds, seconds

Style = tuple[float, float]  # see `Eviction`: its power, and its price of an idle link, 0 without copies
# Each was the best of all for some step, the first for most: ResNet-50 at half its bytes takes 136.1 ms with it and
# 135.3 with the last but one, the 24-layer decoder at 75 % 120.1 and 119.4 with the second, at half 126.3 and 126.0
# with the third; an MLP at half its bytes 12.6 and 12.4 without copies.
_STYLES: tuple[Style, ...] = ((1.0, 0.03), (1.0, 0.003), (1.2, 0.03), (1.5, 0.01), (1.0, 0.0))
_STYLES_WITHOUT_HOST: tuple[Style, ...] = ((1.0, 0.0), (1.5, 0.0), (2.0, 0.0))
_PARTINGS = 3  # times that slots that stay too full get an empty slot before them; the 3D U-Net at 35 % needs one
_TRIES = 4  # to bring the packed bytes under the budget by a lower limit
_CLOSE = 50  # where a fiftieth of the budget or less is missing, the limit is lowered for the plan that there is
_MOST_LOOKS = 10_000  # with which another style is begun: a second and a half; a thousand kernels take no more for all
EFFORT = 4_000  # looks: two seconds for a thousand kernels; five times as many gain ResNet-50 at half its bytes 0.2 %


@dataclass(frozen=True)
class Found:
    """A plan.

    Attributes:
      nbytes: of temporaries, as XLA lays them out.
      seconds: of a step, kernels and copies on their streams.
      host_nbytes: of offloaded values.
      bound_s: no plan within the budget takes less.
      fits: it is within the budget; else it is the one with the least bytes that was found.
    """

    schedule: Schedule
    nbytes: int
    seconds: float
    host_nbytes: int
    bound_s: float
    fits: bool


def plan(
    problem: Problem,
    budget_nbytes: int,
    host_nbytes: int = 0,
    copy_s: CopySeconds | None = None,
    effort: int = EFFORT,
) -> Found:
    """A plan whose temporaries take at most `budget_nbytes`, if one is found.

    Args:
      host_nbytes: that offloaded values may take.
      copy_s: seconds of a copy, one way; None where nothing is offloaded.
      effort: how many ways to make a value again are looked at for something faster.
    """
    return _Planning(problem, budget_nbytes, host_nbytes, copy_s, effort).plan()


def repeated(problem: Problem, budget_nbytes: int) -> frozenset[int]:
    """Kernels that run again in a first plan, without copies, whether it fits or not."""
    order = reorder(problem)
    taped = tape_of(problem, order)
    taped = settled(taped, Ledger(taped.tape).load)
    ledger = Ledger(taped.tape)
    Eviction(ledger, max(1, budget_nbytes - problem.tables_nbytes)).run()
    take_back(ledger, budget_nbytes)
    return frozenset(taped.order[op] for op, _ in ledger.pairs())


class _Planning:
    def __init__(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int, copy_s: CopySeconds | None, effort: int
    ) -> None:
        self.effort = effort
        self.styles = _STYLES if copy_s and host_nbytes else _STYLES_WITHOUT_HOST
        self.problem, self.budget_nbytes = problem, budget_nbytes
        self.host_nbytes, self.copy_s = host_nbytes, copy_s
        self._bound_s = seconds(problem, runs(range(len(problem.kernels))))
        self._last: Found | None = None

    def plan(self) -> Found:
        """In the better order of kernels first; where nothing fits there, in the module's own too."""
        orders = dict.fromkeys([tuple(range(len(self.problem.kernels))), tuple(reorder(self.problem))])
        trials = [_Trial(self, order) for order in orders]
        for trial in trials:
            if trial.may_fit() and (found := trial.found()).fits:
                return found
        tried = list[Found]()
        for trial in reversed(trials):
            tried.append(trial.run())
            if tried[-1].fits:
                break
        return min(tried, key=rank)

    def found(self, schedule: Schedule) -> Found:
        if self._last is None or self._last.schedule != schedule:
            self._last = self._packed(schedule)
        return self._last

    def _packed(self, schedule: Schedule) -> Found:
        packed = pack(self.problem, schedule)
        took = seconds(self.problem, schedule, self.copy_s)
        fits = packed.nbytes <= self.budget_nbytes
        return Found(schedule, packed.nbytes, took, packed.host_nbytes, self._bound_s, fits)


def rank(found: Found) -> tuple[bool, float]:
    """For `min`: what fits, the faster the better; else the smaller."""
    return not found.fits, found.seconds if found.fits else found.nbytes


class _Trial:
    """Plans in one order of kernels."""

    def __init__(self, planning: _Planning, order: Sequence[int]) -> None:
        self._planning, self._problem = planning, planning.problem
        self._budget_nbytes = planning.budget_nbytes - self._problem.tables_nbytes  # for what is no table
        self._best: Found | None = None
        self.styles: Sequence[Style] = planning.styles
        taped = tape_of(self._problem, order)
        self.taped: Taped = settled(taped, Ledger(taped.tape).load)
        self.ledger = Ledger(self.taped.tape)
        self._open()

    def may_fit(self) -> bool:
        """As it stands, if the layout has no holes?"""
        return self.ledger.peak_nbytes <= self._budget_nbytes

    def found(self) -> Found:
        return self._planning.found(needed(self._problem, self.schedule()))

    def schedule(self) -> Schedule:
        return tuple(action for actions in self._by_slot() for action in actions)

    def _by_slot(self) -> list[list[Action]]:
        """The actions of every slot; copies that begin or end behind it are the last."""
        order, found = self.taped.order, []
        before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
        kinds = (Kind.PREFETCHED, Kind.OFFLOAD, Kind.OFFLOADED, Kind.PREFETCH)
        for slot, kind, copy in events(self.ledger):
            (behind if kind else before)[slot].append(Action(kinds[kind], self.taped.values[copy.value]))
        for slot, ops in enumerate(self.ledger.again):
            ran = runs(order[op] for op in (*ops, *self.taped.work[slot]))
            found.append([*before[slot], *ran, *behind[slot]])
        return found

    def run(self) -> Found:
        """Bring the bytes under the budget, with copies that are waited for where nothing else does; then search."""
        self.limit = budget = max(1, self._budget_nbytes, int(self.taped.tape.least_nbytes.max()))
        style = self._start(budget)
        if Eviction(self.ledger, budget).run() or self._settle(budget):
            spare = self._fit(style)
            limit = budget if spare < 0 else self.ledger.peak_nbytes + spare
            Repair(self.ledger, limit, self.offers).run(self._over, self._planning.effort)
        return self._best or self.found()

    def _fit(self, style: Style) -> int:
        """Lower the limit until the packed bytes keep the budget; what the plan that comes nearest leaves of it."""
        tried = []
        for _ in range(_TRIES):
            take_back(self.ledger, self.limit)
            spare = self._spare()
            if spare >= 0:
                return spare
            tried.append((-spare, len(tried), self.ledger.pairs(), self._copies()))
            self._correct()
            self.limit = max(1, self._least(), min(self.limit, self.ledger.peak_nbytes) + spare)
            if -spare * _CLOSE > self._planning.budget_nbytes:
                style = self._start(self.limit)
            if not self._eviction(self.limit, style).run() and not Eviction(self.ledger, self.limit).run():
                break
        over, _, pairs, copies = min(tried)
        self.ledger.become(pairs, copies)
        return -over

    def _least(self) -> int:
        return int((self.taped.tape.least_nbytes + self.ledger.extra).max())

    def _spare(self) -> int:
        """What the plan leaves of the budget, packed; negative where it takes more."""
        found = self.found()
        self._best = found if self._best is None else min(self._best, found, key=rank)
        return self._planning.budget_nbytes - found.nbytes

    def _over(self) -> int:
        return max(0, -self._spare())

    def _start(self, limit: int) -> Style:
        """The best of several plans: with copies that keep nobody waiting, by their price, and without.

        A percent of the limit that the layout takes above it is as bad as a percent of the time: where the bytes came
        first, the 3D U-Net on a P100 was 6 % slower at half its bytes.
        Styles that did not keep this limit are not tried again for a lower one.
        """
        tried, ready, looks = [], [], 0
        for style in self.styles:
            self.ledger.become(())
            eviction = self._eviction(limit, style)
            eviction.run()
            take_back(self.ledger, limit)
            ready.append((eviction.excess(), self._seconds(), len(ready), style, self.ledger.pairs(), self._copies()))
            looks += eviction.looks
            if looks > _MOST_LOOKS and not eviction.excess():
                break
        for excess, took, number, style, pairs, copies in sorted(ready, key=lambda one: one[:3]):
            if tried and not excess and took >= min(tried)[1]:
                break  # packed it can only be worse
            self.ledger.become(pairs, copies)
            tried.append((excess, took * (1 + self._over() / limit), number, style, pairs, copies))
        *_, best, pairs, copies = min(tried)
        self.ledger.become(pairs, copies)
        self.styles = [style for excess, *_, style, _, _ in ready if not excess] or [best]
        return best

    def _eviction(self, limit: int, style: Style) -> Eviction:
        """With copies that keep nobody waiting, where the style has a price for them."""
        self._refresh()
        power, idle_price = style
        offers = self.offers if idle_price else None
        return Eviction(self.ledger, limit, power=power, offers=offers, idle_price=idle_price, waits=False)

    def _copies(self) -> list[Copy]:
        return [self.ledger.copies[key] for key in sorted(self.ledger.copies)]

    def _refresh(self) -> None:
        if self.offers is not None:
            self.offers.refresh()

    def _seconds(self) -> float:
        self._refresh()
        return float(self.ledger.slot_seconds.sum()) if self.offers is None else self.offers.links.seconds

    def _settle(self, limit: int) -> bool:
        """Where evicting alone gets stuck: other repetitions, copies that are waited for, room between two kernels."""
        for _ in range(_PARTINGS):
            self._refresh()
            Eviction(self.ledger, limit, offers=self.offers).run()
            if Repair(self.ledger, limit, self.offers).settle(self._planning.effort // 4):
                return True
            self._part(limit)
        return False

    def _part(self, limit: int) -> None:
        """Put an empty slot before each that is above the limit; what ran again before it does so there."""
        slots = [int(slot) for slot in np.flatnonzero(self.ledger.load > limit) if self.ledger.again[slot]]
        pairs, copies, extra = self.ledger.pairs(), self._copies(), self.ledger.extra
        later = np.arange(len(extra)) + np.searchsorted(slots, np.arange(len(extra)), side="right")
        self.taped = self.taped.parted(frozenset(slots))
        self.ledger = Ledger(self.taped.tape)
        spread = np.zeros(self.taped.tape.count, np.int64)
        spread[later] = extra
        self.ledger.extra = spread
        moved = (
            Copy(c.value, None if c.out is None else int(later[c.out]), *(int(later[n]) for n in (c.gone, c.back)))
            for c in copies
        )
        self.ledger.become(((op, int(later[slot]) - (slot in slots)) for op, slot in pairs), moved)
        self._open()

    def _open(self) -> None:
        copy_s, host_nbytes = self._planning.copy_s, self._planning.host_nbytes
        self.offers = Offers(self.ledger, copy_s, host_nbytes) if copy_s and host_nbytes else None

    def _correct(self) -> None:
        """Count in every slot what the layout counts there."""
        by_slot = self._by_slot()
        there = live_nbytes(self._problem, self.schedule())
        ends = np.cumsum([len(actions) for actions in by_slot])
        extra = self.ledger.extra.copy()
        for slot, (actions, end) in enumerate(zip(by_slot, ends.tolist(), strict=True)):
            if actions:
                extra[slot] += there[end - len(actions) : end].max() - self.ledger.load[slot]
        self.ledger.extra = extra
