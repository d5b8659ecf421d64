"""Finds the fastest schedule of a problem within a budget.

1. Another order of the kernels costs no time: if the module's order or the one of `reorder` fits unchanged, it is used.
2. Otherwise `reorder`'s order becomes a tape, on whose ledger plans begin with what pins ask for: values are evicted
   until the limit is kept, once for each heuristic, with offloads that stall nobody; what is left travels, and so does
   everything (`travel`). Of each family the fastest result, packed, is kept.
3. The best of these, then the other if it may be faster: if it is above the limit, offloads that stall kernels,
   neighbourhoods around slots above the limit, and empty slots before these in which values may be recomputed or on the
   host, at most three times.
4. Packed bytes exceed live bytes: the limit is lowered by the difference to the budget, at most four times.
5. Large-neighbourhood search for a plan that fits, then for a faster one, until `effort` gaps were evaluated.
6. Only if nothing fits in this order, 2 to 5 in the module's own. If that fails too, the smallest plan found.

Effort is counted, never timed, so every machine finds the same plan.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from memplan.errors import UnsupportedProgramError
from memplan.planning.liveness import eliminate_dead
from memplan.planning.packing import live_nbytes, pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import Action, CopySeconds, Kind, Schedule, Solution, rank, runs, seconds
from memplan.planning.search.chains import Excess
from memplan.planning.search.effort import DEFAULT, Effort, Heuristic, Way
from memplan.planning.search.evict import Eviction, prune, undo_offload
from memplan.planning.search.ledger import AWAY_NBYTES, Ledger, Offload, Recomputation, reconcile
from memplan.planning.search.links import CopyScheduler, events, plan_seconds
from memplan.planning.search.lns import NeighbourhoodSearch
from memplan.planning.search.reorder import reorder
from memplan.planning.search.tape import Tape, record, with_away
from memplan.planning.search.travel import move_beside_kernels, travel


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
        if unmoved := min((one.unmoved() for one in searches), key=len):
            raise _unkept(self.problem, unmoved)
        searches = [one for one in searches if not one.unmoved()]
        for one in searches:
            if one.may_fit() and (found := one.solution()).fits:
                return found
        if 0 < self.budget_nbytes < min(one.least_nbytes for one in searches):
            return searches[0].solution()
        tried = list[Solution]()
        for one in reversed(searches):
            tried.append(one.run())
            if tried[-1].fits:
                break
            searches[0].heuristics = one.heuristics[:1]
        return min(tried, key=rank)

    def solution(self, schedule: Schedule) -> Solution:
        if self.latest is None or self.latest.schedule != schedule:
            packed = pack(self.problem, schedule)
            took = seconds(self.problem, schedule, self.copy_s)
            fits = packed.nbytes <= self.budget_nbytes
            self.latest = Solution(schedule, packed.nbytes, took, packed.host_nbytes, self.bound_s, fits)
        return self.latest


def _unkept(problem: Problem, buffers: Sequence[int]) -> UnsupportedProgramError:
    pins = (pin for number in buffers if (pin := problem.buffers[number].pin))
    told = ", ".join(sorted({f"{pin.name!r} to {pin.where.value!r}" for pin in pins}))
    return UnsupportedProgramError(
        f"no plan was found that pins {told} ({problem.buffers[buffers[0]].name}): a value can be computed again only "
        "while what it is made of is there and was not overwritten, and be on the host only within the host budget and "
        "between kernels of one computation. Pin it elsewhere, or leave it to the planner."
    )


_Decisions = tuple[list[Recomputation], list[Offload]]
"""What `Ledger.restore` takes."""


class _Constructed(NamedTuple):
    """A plan, ordered by its excess, then by its seconds."""

    excess: float
    seconds: float
    number: int  # of all that are compared
    way: Way
    decisions: _Decisions


class _OrderSearch:
    """Plans in one order of kernels."""

    def __init__(self, search: _Search, order: Sequence[int]) -> None:
        self._search, self._problem, self._effort = search, search.problem, search.effort
        self._budget_nbytes = search.budget_nbytes - self._problem.tables_nbytes  # without tables
        self._best: Solution | None = None
        offloads = search.copy_s and search.host_nbytes
        # to evict by, the best first
        self.heuristics = self._effort.heuristics if offloads else self._effort.heuristics_without_host
        self._ledger = Ledger(with_away(self._problem, reconcile(self._problem, record(self._problem, order))))
        self._scheduler = self._new_scheduler()
        self._pinned = self._keep_pins()  # what each plan begins with

    def unmoved(self) -> list[int]:
        """Buffers whose pins no plan was found to keep."""
        return [self._ledger.tape.values[value].buffer for value in self._ledger.unmoved()]

    def _keep_pins(self) -> _Decisions:
        """Do what the pins ask for, and nothing else."""
        ledger, scheduler, values = self._ledger, self._scheduler, self._ledger.tape.values
        if self._problem.moves_pinned:
            for value in ledger.unmoved() if scheduler else ():
                away, needs = values[value].away, ledger.needs[value]
                assert scheduler is not None and away is not None
                if offload := scheduler.tightest(value, needs[bisect_left(needs, away)]):
                    ledger.offload(offload)
            limit, first = AWAY_NBYTES // 2, [1.0 if one.away is None else 1e9 for one in values]
            Eviction(ledger, limit, noise=first, effort=replace(self._effort, least_share=0.0)).run()
            prune(ledger, limit)
        return self._decisions()

    @property
    def least_nbytes(self) -> int:
        """No plan takes less in this order."""
        return int(self._ledger.tape.least_nbytes.max()) + self._problem.tables_nbytes

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
        """Construct plans; bring the best under the budget and search from there, then another that may be faster."""
        budget, tape = max(1, self._budget_nbytes, int(self._ledger.tape.least_nbytes.max())), self._ledger.tape
        evicted = self._evicted(budget)
        families = [evicted] if self._scheduler is None else [evicted, self._travelling(evicted, budget)]
        first, *others = sorted(self._packed(family, budget) for family in families)
        self._improve(first, tape, budget)
        for one in others:
            best = self._best
            if best is not None and not first.excess and (not best.fits or one.seconds < best.seconds):
                self._improve(one, tape, budget)
        return self._best or self.solution()

    def _improve(self, start: _Constructed, tape: Tape, budget: int) -> None:
        """Bring a plan under the budget, with stalls for copies only if nothing else does; then search."""
        self._limit, self._ledger = budget, Ledger(tape)
        self._scheduler = self._new_scheduler()
        self._ledger.restore(*start.decisions)
        if Eviction(self._ledger, budget, effort=self._effort).run() or self._relieve(budget):
            spare = self._fit(start.way)
            limit = budget if spare < 0 else self._ledger.peak_nbytes + spare
            self._neighbourhoods(limit).improve(self._over_nbytes, self._effort.evaluations)

    def _evicted(self, limit: int) -> list[_Constructed]:
        """Plans by eviction alone, one for each heuristic. Those that do not keep this limit are not tried again."""
        found, evaluations = list[_Constructed](), 0
        for heuristic in self.heuristics:
            self._ledger.restore(*self._pinned)
            evaluations += self._carry_out(way := Way(evicts=heuristic), limit)
            found.append(self._constructed(way, limit, len(found)))
            if evaluations > self._effort.construction_evaluations and not found[-1].excess:
                break
        kept = [one.way.evicts for one in found if not one.excess and one.way.evicts]
        self.heuristics = kept or self.heuristics[:1]
        return found

    def _travelling(self, evicted: Sequence[_Constructed], limit: int) -> list[_Constructed]:
        """Plans in which values travel: all of them, or those that eviction leaves above the limit.

        Where eviction leaves none, also those that it may add to copies that stall nobody.
        """
        effort, found = self._effort, list[_Constructed]()
        whole = [*(Way(travels=one) for one in effort.travels), *(() if min(evicted).excess else effort.hidden)]
        ways = [(way, way, self._pinned) for way in whole]  # the way, the rest of it, and the plan that it begins with
        for one in evicted:
            for rest in (Way(travels=travels) for travels in effort.travels[:2] if one.excess):
                ways.append((one.way._replace(travels=rest.travels), rest, one.decisions))
        for way, rest, decisions in ways:
            self._ledger.restore(*decisions)
            self._carry_out(rest, limit)
            found.append(self._constructed(way, limit, len(evicted) + len(found)))
        return found

    def _constructed(self, way: Way, limit: int, number: int) -> _Constructed:
        """The ledger's plan."""
        excess = Excess(limit).of(self._ledger.load)
        return _Constructed(excess, plan_seconds(self._ledger, self._scheduler), number, way, self._decisions())

    def _packed(self, ready: Sequence[_Constructed], limit: int) -> _Constructed:
        """The best, once packed.

        One percent of packed bytes above the limit counts as one percent of time: when bytes came first, the 3D U-Net
        on a P100 was 6 % slower at half its bytes.
        """
        tried = list[_Constructed]()
        for one in sorted(ready):
            if tried and (one.excess > tried[0].excess or one.seconds >= min(tried).seconds):
                break  # packed, it can only be worse
            self._ledger.restore(*one.decisions)
            tried.append(one._replace(seconds=one.seconds * (1 + self._over_nbytes() / limit)))
        return min(tried)

    def _carry_out(self, way: Way, limit: int) -> int:
        """Bring the ledger's plan under the limit, as far as this way does it; returns the evaluations that it took."""
        evaluations, ledger, scheduler, least = 0, self._ledger, self._scheduler, int(self._effort.least_share * limit)
        if way.hides and scheduler:
            travel(ledger, scheduler, limit, way.hides, least)
            while waited_for := scheduler.links.waited_for:
                undo_offload(ledger, next(iter(waited_for)))
                scheduler.refresh()
        if way.evicts:
            eviction = self._eviction(limit, way.evicts)
            eviction.run()
            prune(ledger, limit)
            evaluations = eviction.evaluations
        if way.travels and scheduler and ledger.peak_nbytes > limit:
            travel(ledger, scheduler, limit, way.travels, least)
        if self._problem.moves_pinned and scheduler:
            move_beside_kernels(ledger, scheduler, limit)
        return evaluations

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
        plan = self._decisions()
        later = np.arange(len(ledger.slack)) + np.searchsorted(slots, np.arange(len(ledger.slack)), side="right")
        self._ledger = Ledger(ledger.tape.with_empty_slots(frozenset(slots)))
        slack = np.zeros(self._ledger.tape.count, np.int64)
        slack[later] = ledger.slack
        self._ledger.set_slack(slack)
        at = later.tolist()

        def shifted(recomputations: Sequence[Recomputation], offloads: Sequence[Offload]) -> _Decisions:
            moved = (
                Offload(one.value, None if one.start is None else at[one.start], at[one.end], at[one.prefetch])
                for one in offloads
            )
            return [(op, at[slot] - (slot in slots)) for op, slot in recomputations], [*moved]

        self._pinned = shifted(*self._pinned)
        self._ledger.restore(*shifted(*plan))
        self._scheduler = self._new_scheduler()

    def _fit(self, way: Way) -> int:
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
                if way.hides or way.travels:
                    self._ledger.restore(*self._pinned)
                else:
                    best = self._packed(self._evicted(self._limit), self._limit)
                    self._ledger.restore(*best.decisions)
                    way = best.way
            self._carry_out(way._replace(travels=self._effort.travels[0]), self._limit)
            if not Eviction(self._ledger, self._limit, effort=self._effort).run():
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

    def _decisions(self) -> _Decisions:
        """The ledger's plan, for `Ledger.restore`."""
        return self._ledger.recomputations(), [self._ledger.offloads[key] for key in sorted(self._ledger.offloads)]

    def _new_scheduler(self) -> CopyScheduler | None:
        copy_s, host_nbytes = self._search.copy_s, self._search.host_nbytes
        return CopyScheduler(self._ledger, copy_s, host_nbytes) if copy_s and host_nbytes else None
