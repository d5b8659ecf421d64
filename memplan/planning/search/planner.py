"""Finds the fastest schedule of a problem within a budget.

1. Another order of the kernels costs no time: if the module's order or the one of `reorder` fits unchanged, it is used.
2. Otherwise `reorder`'s order becomes a tape, and construction evicts on its ledger until the limit is kept, once for
   each heuristic, with offloads that stall nobody; the fastest result, packed, is kept.
3. If eviction gets stuck: offloads that stall kernels, neighbourhoods around slots above the limit, and empty slots
   before these in which values may be recomputed or on the host, at most three times.
4. Packed bytes exceed live bytes: the limit is lowered by the difference to the budget, at most four times.
5. Large-neighbourhood search for a plan that fits, then for a faster one, until `effort` gaps were evaluated.
6. Only if nothing fits in this order, 2 to 5 in the module's own. If that fails too, the smallest plan found.

Effort is counted, never timed, so every machine finds the same plan.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.liveness import eliminate_dead
from memplan.planning.packing import live_nbytes, pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, CopySeconds, Kind, Schedule, Solution, rank, runs, seconds
from memplan.planning.search.effort import DEFAULT, Effort, Heuristic
from memplan.planning.search.evict import Eviction, prune
from memplan.planning.search.ledger import Ledger, Offload, reconcile
from memplan.planning.search.links import CopyScheduler, events, plan_seconds
from memplan.planning.search.lns import NeighbourhoodSearch
from memplan.planning.search.reorder import reorder
from memplan.planning.search.tape import record


def plan(
    problem: Problem,
    budget_nbytes: int,
    host_nbytes: int = 0,
    copy_s: CopySeconds | None = None,
    effort: Effort = DEFAULT,
) -> Solution:
    """A plan whose temporaries fit in `budget_nbytes`, if one is found.

    Args:
      host_nbytes: limit of offloaded values.
      copy_s: seconds of a copy, one way; None: no offloads.
      effort: how hard to search.
    """
    return _Search(problem, budget_nbytes, host_nbytes, copy_s, effort).run()


def recomputed_kernels(problem: Problem, budget_nbytes: int) -> frozenset[int]:
    """Kernels that a first plan recomputes, without offloads, whether it fits or not."""
    ledger = Ledger(reconcile(problem, record(problem, reorder(problem))))
    Eviction(ledger, max(1, budget_nbytes - problem.tables_nbytes)).run()
    prune(ledger, budget_nbytes)
    return frozenset(ledger.tape.operations[op].kernel for op, _ in ledger.recomputations())


@dataclass
class _Search:
    problem: Problem
    budget_nbytes: int
    host_nbytes: int
    copy_s: CopySeconds | None
    effort: Effort
    latest: Solution | None = None  # steps often ask for the layout that the previous one ended with

    def __post_init__(self) -> None:
        self.bound_s = seconds(self.problem, runs(range(len(self.problem.kernels))))

    def run(self) -> Solution:
        """Search the better order of kernels first; if nothing fits there, the module's own too."""
        orders = dict.fromkeys([tuple(range(len(self.problem.kernels))), tuple(reorder(self.problem))])
        searches = [_OrderSearch(self, order) for order in orders]
        for one in searches:
            if one.may_fit() and (found := one.solution()).fits:
                return found
        tried = list[Solution]()
        for one in reversed(searches):
            tried.append(one.run())
            if tried[-1].fits:
                break
        return min(tried, key=rank)

    def solution(self, schedule: Schedule) -> Solution:
        if self.latest is None or self.latest.schedule != schedule:
            packed = pack(self.problem, schedule)
            took = seconds(self.problem, schedule, self.copy_s)
            fits = packed.nbytes <= self.budget_nbytes
            self.latest = Solution(schedule, packed.nbytes, took, packed.host_nbytes, self.bound_s, fits)
        return self.latest


class _OrderSearch:
    """Plans in one order of kernels."""

    def __init__(self, search: _Search, order: Sequence[int]) -> None:
        self._search, self._problem, self._effort = search, search.problem, search.effort
        self._budget_nbytes = search.budget_nbytes - self._problem.tables_nbytes  # without tables
        self._best: Solution | None = None
        offloads = search.copy_s and search.host_nbytes
        self._heuristics: Sequence[Heuristic] = (
            self._effort.heuristics if offloads else self._effort.heuristics_without_host
        )
        self._ledger = Ledger(reconcile(self._problem, record(self._problem, order)))
        self._scheduler = self._new_scheduler()

    def may_fit(self) -> bool:
        """Does it fit unchanged, if the layout has no fragmentation?"""
        return self._ledger.peak_nbytes <= self._budget_nbytes

    def solution(self) -> Solution:
        """The ledger's plan."""
        schedule = tuple(action for actions in self._actions() for action in actions)
        return self._search.solution(eliminate_dead(self._problem, schedule))

    def _actions(self) -> list[list[Action]]:
        """Actions by slot, with the copies that begin or end after it last."""
        tape, found = self._ledger.tape, list[list[Action]]()
        before, behind = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
        for slot, kind, offload in events(self._ledger):
            side = before if kind is Kind.PREFETCHED else behind
            side[slot].append(Action(kind, tape.values[offload.value].buffer))
        for slot, prelude in enumerate(self._ledger.preludes):
            work = tape.slots[slot].operation
            ran = runs(tape.operations[op].kernel for op in (prelude if work is None else (*prelude, work)))
            found.append([*before[slot], *ran, *behind[slot]])
        return found

    def run(self) -> Solution:
        """Bring the bytes under the budget, with stalls for copies only if nothing else does; then search."""
        self._limit = budget = max(1, self._budget_nbytes, int(self._ledger.tape.least_nbytes.max()))
        heuristic = self._construct(budget)
        if Eviction(self._ledger, budget, effort=self._effort).run() or self._relieve(budget):
            spare = self._fit(heuristic)
            limit = budget if spare < 0 else self._ledger.peak_nbytes + spare
            self._neighbourhoods(limit).improve(self._over_nbytes, self._effort.evaluations)
        return self._best or self.solution()

    def _construct(self, limit: int) -> Heuristic:
        """Keep the best of several plans: with copies that stall nobody, by their price, and without.

        One percent of packed bytes above the limit counts as one percent of time: when bytes came first, the 3D U-Net
        on a P100 was 6 % slower at half its bytes. Heuristics that did not keep this limit are not tried again for a
        lower one.
        """
        tried, ready, evaluations = [], [], 0
        for heuristic in self._heuristics:
            self._ledger.restore(())
            eviction = self._eviction(limit, heuristic)
            eviction.run()
            prune(self._ledger, limit)
            ready.append(
                (
                    eviction.excess(),
                    plan_seconds(self._ledger, self._scheduler),
                    len(ready),
                    heuristic,
                    *self._decisions(),
                )
            )
            evaluations += eviction.evaluations
            if evaluations > self._effort.construction_evaluations and not eviction.excess():
                break
        for excess, took, number, heuristic, recomputations, offloads in sorted(ready, key=lambda one: one[:3]):
            if tried and not excess and took >= min(tried)[1]:
                break  # packed, it can only be worse
            self._ledger.restore(recomputations, offloads)
            took *= 1 + self._over_nbytes() / limit
            tried.append((excess, took, number, heuristic, recomputations, offloads))
        *_, best, recomputations, offloads = min(tried)
        self._ledger.restore(recomputations, offloads)
        self._heuristics = [heuristic for excess, *_, heuristic, _, _ in ready if not excess] or [best]
        return best

    def _relieve(self, limit: int) -> bool:
        """If eviction alone gets stuck: other recomputations, copies that kernels stall for, empty slots."""
        for _ in range(self._effort.empty_slot_rounds):
            self._eviction(limit).run()
            if self._neighbourhoods(limit).reach_limit(self._effort.evaluations // 4):
                return True
            self._insert_empty_slots(limit)
        return False

    def _insert_empty_slots(self, limit: int) -> None:
        """Insert an empty slot before each one above the limit that has a prelude, and move the prelude there."""
        ledger = self._ledger
        slots = [int(slot) for slot in np.flatnonzero(ledger.load > limit) if ledger.preludes[slot]]
        recomputations, offloads = self._decisions()
        later = np.arange(len(ledger.slack)) + np.searchsorted(slots, np.arange(len(ledger.slack)), side="right")
        self._ledger = Ledger(ledger.tape.with_empty_slots(frozenset(slots)))
        slack = np.zeros(self._ledger.tape.count, np.int64)
        slack[later] = ledger.slack
        self._ledger.set_slack(slack)
        at = later.tolist()
        shifted = (
            Offload(one.value, None if one.start is None else at[one.start], at[one.end], at[one.prefetch])
            for one in offloads
        )
        self._ledger.restore(((op, at[slot] - (slot in slots)) for op, slot in recomputations), shifted)
        self._scheduler = self._new_scheduler()

    def _fit(self, heuristic: Heuristic) -> int:
        """Lower the limit until the packed bytes keep the budget; returns what the closest plan leaves of it."""
        tried = []
        for _ in range(self._effort.limits):
            prune(self._ledger, self._limit)
            spare = self._spare_nbytes()
            if spare >= 0:
                return spare
            tried.append((-spare, len(tried), *self._decisions()))
            self._reconcile()
            least = int((self._ledger.tape.least_nbytes + self._ledger.slack).max())
            self._limit = max(1, least, min(self._limit, self._ledger.peak_nbytes) + spare)
            if -spare * self._effort.adjusted_part > self._search.budget_nbytes:
                heuristic = self._construct(self._limit)
            evicted = self._eviction(self._limit, heuristic).run()
            if not evicted and not Eviction(self._ledger, self._limit, effort=self._effort).run():
                break
        over, _, recomputations, offloads = min(tried)
        self._ledger.restore(recomputations, offloads)
        return -over

    def _reconcile(self) -> None:
        """Set every slot's slack to the difference between the packed layout of this plan and its values."""
        actions = self._actions()
        there = live_nbytes(self._problem, tuple(action for some in actions for action in some))
        ends = np.cumsum([len(some) for some in actions])
        slack = self._ledger.slack.copy()
        for slot, (some, end) in enumerate(zip(actions, ends.tolist(), strict=True)):
            if some:
                slack[slot] += there[end - len(some) : end].max() - self._ledger.load[slot]
        self._ledger.set_slack(slack)

    def _spare_nbytes(self) -> int:
        """Bytes of the budget that the packed plan leaves; negative if it exceeds it."""
        found = self.solution()
        self._best = found if self._best is None else min(self._best, found, key=rank)
        return self._search.budget_nbytes - found.nbytes

    def _over_nbytes(self) -> int:
        return max(0, -self._spare_nbytes())

    def _eviction(self, limit: int, heuristic: Heuristic | None = None) -> Eviction:
        """With a heuristic: offloads that stall no kernel, if it has a price for them; without one: all offloads."""
        if self._scheduler is not None:
            self._scheduler.refresh()
        if heuristic is None:
            return Eviction(self._ledger, limit, scheduler=self._scheduler, effort=self._effort)
        power, idle_price = heuristic
        scheduler = self._scheduler if idle_price else None
        return Eviction(self._ledger, limit, power, scheduler, idle_price, may_stall=False, effort=self._effort)

    def _neighbourhoods(self, limit: int) -> NeighbourhoodSearch:
        return NeighbourhoodSearch(self._ledger, limit, self._scheduler, effort=self._effort)

    def _decisions(self) -> tuple[list[tuple[int, int]], list[Offload]]:
        """The ledger's plan, for `Ledger.restore`."""
        return self._ledger.recomputations(), [self._ledger.offloads[key] for key in sorted(self._ledger.offloads)]

    def _new_scheduler(self) -> CopyScheduler | None:
        copy_s, host_nbytes = self._search.copy_s, self._search.host_nbytes
        return CopyScheduler(self._ledger, copy_s, host_nbytes) if copy_s and host_nbytes else None
