"""A problem and a budget -> the schedule that keeps the budget and takes the least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.evict import Eviction, take_back
from memplan.planning.ledger import Ledger
from memplan.planning.packing import live_nbytes, needed, pack
from memplan.planning.problem import Problem
from memplan.planning.reorder import reorder
from memplan.planning.repair import Repair
from memplan.planning.schedule import Schedule, runs
from memplan.planning.tape import Taped, settled, tape_of
from memplan.planning.timing import CopySeconds, seconds

_TRIES = 8  # to bring the packed bytes under the budget
_LOOKS = 20_000


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


def plan(problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None) -> Found:
    """A plan whose temporaries take at most `budget_nbytes`, if one is found.

    Args:
      host_nbytes: that offloaded values may take.
      copy_s: seconds of a copy, one way; None where nothing is offloaded.
    """
    return _Planning(problem, budget_nbytes, host_nbytes, copy_s).plan()


def floor(problem: Problem) -> tuple[int, int]:
    """Least bytes of temporaries that any plan needs, and the kernel that sets it."""
    taped = tape_of(problem)
    taped = settled(taped, Ledger(taped.tape).load)
    least = taped.tape.least_nbytes
    slot = int(least.argmax())
    return int(least[slot]), taped.order[slot]


class _Planning:
    def __init__(self, problem: Problem, budget_nbytes: int, host_nbytes: int, copy_s: CopySeconds | None) -> None:
        self._problem, self._budget_nbytes = problem, budget_nbytes
        self._host_nbytes, self._copy_s = host_nbytes, copy_s
        self._bound_s = seconds(problem, runs(range(len(problem.kernels))))

    def plan(self) -> Found:
        orders = [tuple(range(len(self._problem.kernels))), reorder(self._problem)]
        found = [self._found(runs(order)) for order in orders]
        if any(one.fits for one in found):
            return next(one for one in found if one.fits)
        trials = [_Trial(self, order) for order in orders]
        for trial in trials:
            trial.evict()
        best = min(trials, key=lambda trial: rank(trial.best))
        if best.best.fits:
            best.repair()
        return min([*found, *(trial.best for trial in trials)], key=rank)

    def _found(self, schedule: Schedule) -> Found:
        packed = pack(self._problem, schedule)
        took = seconds(self._problem, schedule, self._copy_s)
        fits = packed.nbytes <= self._budget_nbytes
        return Found(schedule, packed.nbytes, took, packed.host_nbytes, self._bound_s, fits)


def rank(found: Found) -> tuple[bool, float]:
    """For `min`: what fits, the faster the better; else the smaller."""
    return not found.fits, found.seconds if found.fits else found.nbytes


class _Trial:
    """Plans in one order of kernels."""

    def __init__(self, planning: _Planning, order: Sequence[int]) -> None:
        self._planning, self._problem = planning, planning._problem
        taped = tape_of(self._problem, order)
        self.taped: Taped = settled(taped, Ledger(taped.tape).load)
        self.ledger = Ledger(self.taped.tape)
        self.best = self.found()

    def found(self) -> Found:
        return self._planning._found(needed(self._problem, self.schedule()))

    def schedule(self) -> Schedule:
        order = self.taped.order
        return runs(order[op] for slot in range(len(order)) for op in (*self.ledger.again[slot], slot))

    def evict(self) -> None:
        limit = budget = self._planning._budget_nbytes - self._problem.tables_nbytes
        for _ in range(_TRIES):
            Eviction(self.ledger, limit).run()
            take_back(self.ledger, limit)
            found = self.found()
            self.best = min(self.best, found, key=rank)
            if found.fits:
                self.limit = limit
                return
            self._correct()
            over = found.nbytes - self._problem.tables_nbytes - int(self.ledger.load.max())
            limit = min(limit, budget - max(0, over))

    def _correct(self) -> None:
        """Count in every slot what the layout counts there."""
        there = live_nbytes(self._problem, self.schedule())
        most = np.zeros(len(self.taped.order), np.int64)
        at = 0
        for slot, ops in enumerate(self.ledger.again):
            most[slot] = there[at : at + len(ops) + 1].max()
            at += len(ops) + 1
        self.ledger.extra += most - self.ledger.load

    def repair(self) -> None:
        def accept(ledger: Ledger) -> bool:
            found = self.found()
            self.best = min(self.best, found, key=rank)
            return found.fits

        Repair(self.ledger, self.limit, accept).run(_LOOKS)
