"""A problem and a budget -> the schedule that keeps the budget and takes the least time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.evict import Eviction, take_back
from memplan.planning.ledger import Copy, Ledger
from memplan.planning.links import Offers, events
from memplan.planning.packing import live_nbytes, needed, pack
from memplan.planning.problem import Problem
from memplan.planning.reorder import reorder
from memplan.planning.repair import Repair
from memplan.planning.schedule import Action, Kind, Schedule, runs
from memplan.planning.tape import Taped, settled, tape_of
from memplan.planning.timing import CopySeconds, seconds

_STYLES = ((1.0, 0.0), (1.5, 0.0), (1.0, 0.003), (1.0, 0.01), (1.5, 0.01), (1.0, 0.03))  # power, idle price
_STYLES_WITHOUT_HOST = ((1.0, 0.0), (1.5, 0.0), (2.0, 0.0))
_TRIES = 8  # to bring the packed bytes under the budget
EFFORT = 20_000


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


def floor(problem: Problem) -> tuple[int, int]:
    """Least bytes of temporaries that any plan needs, and the kernel that sets it."""
    found = []
    for order in (None, reorder(problem)):
        taped = tape_of(problem, order)
        least = settled(taped, Ledger(taped.tape).load).tape.least_nbytes
        slot = int(least.argmax())
        found.append((int(least[slot]) + problem.tables_nbytes, taped.order[slot]))
    return min(found)


class _Planning:
    def __init__(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int, copy_s: CopySeconds | None, effort: int
    ) -> None:
        self.effort = effort
        self.problem, self.budget_nbytes = problem, budget_nbytes
        self.host_nbytes, self.copy_s = host_nbytes, copy_s
        self._bound_s = seconds(problem, runs(range(len(problem.kernels))))

    def plan(self) -> Found:
        orders = [tuple(range(len(self.problem.kernels))), reorder(self.problem)]
        found = [self.found(runs(order)) for order in orders]
        if any(one.fits for one in found):
            return next(one for one in found if one.fits)
        trials = [_Trial(self, order) for order in orders]
        for trial in trials:
            trial.evict()
        best = min(trials, key=lambda trial: rank(trial.best))
        if best.best.fits:
            best.repair()
        return min([*found, *(trial.best for trial in trials)], key=rank)

    def found(self, schedule: Schedule) -> Found:
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
        taped = tape_of(self._problem, order)
        self.taped: Taped = settled(taped, Ledger(taped.tape).load)
        self.ledger = Ledger(self.taped.tape)
        copy_s, host_nbytes = planning.copy_s, planning.host_nbytes
        self.offers = Offers(self.ledger, copy_s, host_nbytes) if copy_s and host_nbytes else None
        self.best = self.found()

    def found(self) -> Found:
        return self._planning.found(needed(self._problem, self.schedule()))

    def schedule(self) -> Schedule:
        return tuple(action for actions in self._by_slot() for action in actions)

    def _by_slot(self) -> list[list[Action]]:
        """The actions of every slot; copies that begin or end behind it are the last."""
        order, found = self.taped.order, []
        before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
        kinds = (Kind.PREFETCHED, Kind.OFFLOAD, Kind.OFFLOADED, Kind.PREFETCH)
        for slot, kind, copy in events(self.ledger.copies.values()):
            (behind if kind else before)[slot].append(Action(kinds[kind], self.taped.values[copy.value]))
        for slot, ops in enumerate(self.ledger.again):
            found.append([*before[slot], *runs(order[op] for op in (*ops, slot)), *behind[slot]])
        return found

    def evict(self) -> None:
        """Bring the packed bytes under the budget, with copies where nothing else does."""
        budget = self._planning.budget_nbytes - self._problem.tables_nbytes
        limit = budget = max(budget, int(self.taped.tape.least_nbytes.max()))
        stuck = 0
        self._start(limit)
        for number in range(_TRIES):
            if not Eviction(self.ledger, limit).run() and (stuck or not self._settle(limit)):
                stuck += 1
            take_back(self.ledger, limit)
            found = self.found()
            self.best = min(self.best, found, key=rank)
            self.limit = limit
            if found.fits or stuck > 1 or number + 1 == _TRIES:
                return
            self._correct()
            over = found.nbytes - self._problem.tables_nbytes - self.ledger.peak_nbytes
            limit = min(limit, budget - max(0, over))

    def _start(self, limit: int) -> None:
        """The best of several plans: with copies that keep nobody waiting, by their price, and without."""
        tried = []
        for power, idle_price in _STYLES if self.offers is not None else _STYLES_WITHOUT_HOST:
            self.ledger.become(())
            offers = self.offers if idle_price else None
            eviction = Eviction(self.ledger, limit, power=power, offers=offers, idle_price=idle_price, waits=False)
            self._refresh()
            eviction.run()
            take_back(self.ledger, limit)
            tried.append((eviction.excess(), self._seconds(), len(tried), self.ledger.pairs(), self._copies()))
        *_, pairs, copies = min(tried)
        self.ledger.become(pairs, copies)

    def _copies(self) -> list[Copy]:
        return [self.ledger.copies[key] for key in sorted(self.ledger.copies)]

    def _refresh(self) -> None:
        if self.offers is not None:
            self.offers.refresh()

    def _seconds(self) -> float:
        self._refresh()
        return float(self.ledger.slot_seconds.sum()) if self.offers is None else self.offers.links.seconds

    def _settle(self, limit: int) -> bool:
        """Where repetitions alone get stuck: with copies, and by trying other ones."""
        if self.offers is not None:
            self.offers.refresh()
            Eviction(self.ledger, limit, offers=self.offers).run()
        return Repair(self.ledger, limit, lambda _: True, self.offers).settle(self._planning.effort // 2)

    def _correct(self) -> None:
        """Count in every slot what the layout counts there."""
        by_slot = self._by_slot()
        there = live_nbytes(self._problem, self.schedule())
        first = np.cumsum([0, *map(len, by_slot[:-1])])
        self.ledger.extra += np.maximum.reduceat(there, first) - self.ledger.load

    def repair(self) -> None:
        """Look for something faster."""

        def accept(ledger: Ledger) -> bool:
            found = self.found()
            self.best = min(self.best, found, key=rank)
            return found.fits

        Repair(self.ledger, self.limit, accept, self.offers).run(self._planning.effort)
