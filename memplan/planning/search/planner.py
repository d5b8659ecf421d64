"""Finds the fastest schedule of a problem within a budget.

1. Another order of the kernels costs no time: if the module's order or the one of `reorder` fits
   unchanged, it is the plan.
2. Otherwise `reorder`'s order becomes a tape, on whose ledger two families of plans are
   constructed. All begin with the actions that pins require. The first family evicts values until
   the limit is kept, once for each heuristic, with offloads that stall no kernel. The second
   streams the remaining excess, or everything, to the host (`streaming`). The fastest result of
   each family, packed, is kept.
3. The faster of the two, then the other if it may be faster, is brought under the limit: by
   offloads that stall kernels, neighbourhoods around slots above the limit, and, at most three
   times, empty slots before these, in which values may be recomputed or on the host.
4. Packed bytes exceed live bytes: the limit is lowered by the difference to the budget, at most
   four times.
5. Large-neighbourhood search finds a plan that fits, then a faster one, until `effort` gaps were
   evaluated.

   A plan that takes hardly more than all kernels once (`Effort.close`) ends 2 and 5.
6. Only if nothing fits in this order, 2 to 5 in the module's own. If that fails too, the smallest
   of these plans.

Effort is counted, never timed, so every machine finds the same plan.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from memplan.errors import UnsupportedProgramError
from memplan.planning.liveness import eliminate_dead
from memplan.planning.packing import live_nbytes, pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import CopySeconds, Schedule, Solution, rank, runs
from memplan.planning.schedule import seconds as schedule_seconds
from memplan.planning.search.chains import Excess
from memplan.planning.search.effort import DEFAULT, Effort, Heuristic, Recipe
from memplan.planning.search.evict import Eviction, prune, undo_offload
from memplan.planning.search.ledger import (
    ABSENT_PENALTY_NBYTES,
    Ledger,
    Offload,
    Recomputation,
    reconcile,
)
from memplan.planning.search.links import CopyScheduler, plan_seconds, slot_actions
from memplan.planning.search.lns import NeighbourhoodSearch
from memplan.planning.search.reorder import reorder
from memplan.planning.search.streaming import overlap_copies, stream
from memplan.planning.search.tape import Tape, record, with_absent_slots


def plan(
    problem: Problem,
    budget_nbytes: int,
    host_nbytes: int = 0,
    copy_s: CopySeconds | None = None,
    effort: Effort = DEFAULT,
) -> Solution:
    """A plan whose temporaries fit in `budget_nbytes`, if the search finds one.

    Args:
      host_nbytes: limit of offloaded values.
      copy_s: seconds of a copy, one way; None: no offloads.
      effort: how hard to search.
    """
    return _PlanSearch(problem, budget_nbytes, host_nbytes, copy_s, effort).run()


def recomputed_kernels(problem: Problem, budget_nbytes: int) -> frozenset[int]:
    """Kernels that a first plan without offloads recomputes, whether it fits or not."""
    ledger = Ledger(reconcile(problem, record(problem, reorder(problem))))
    Eviction(ledger, max(1, budget_nbytes - problem.tables_nbytes)).run()
    prune(ledger, budget_nbytes)
    return frozenset(ledger.tape.operations[op].kernel for op, _ in ledger.recomputations())


@dataclass
class _PlanSearch:
    """A search over both orders of kernels."""

    problem: Problem
    budget_nbytes: int
    host_nbytes: int
    copy_s: CopySeconds | None
    effort: Effort
    # a step of the search often asks for the layout with which the previous step ended
    latest: Solution | None = None

    def __post_init__(self) -> None:
        self.bound_s = schedule_seconds(self.problem, runs(range(len(self.problem.kernels))))

    def run(self) -> Solution:
        """Search `reorder`'s order first; if nothing fits there, the module's own too."""
        own_order = tuple(range(len(self.problem.kernels)))
        orders = dict.fromkeys([own_order, tuple(reorder(self.problem))])
        searches = [_OrderSearch(self, order) for order in orders]
        if unkept := min((search.unkept_pins() for search in searches), key=len):
            raise _unkept_pins_error(self.problem, unkept)
        searches = [search for search in searches if not search.unkept_pins()]
        for search in searches:
            if search.may_fit() and (solution := search.solution()).fits:
                return solution
        if 0 < self.budget_nbytes < min(search.floor_nbytes for search in searches):
            return searches[0].solution()
        solutions = list[Solution]()
        for search in reversed(searches):
            solutions.append(search.run())
            if solutions[-1].fits:
                break
            searches[0].heuristics = search.heuristics[:1]
        return min(solutions, key=rank)

    def solution(self, schedule: Schedule) -> Solution:
        if self.latest is None or self.latest.schedule != schedule:
            packing = pack(self.problem, schedule)
            self.latest = Solution(
                schedule,
                packing.nbytes,
                schedule_seconds(self.problem, schedule, self.copy_s),
                packing.host_nbytes,
                self.bound_s,
                packing.nbytes <= self.budget_nbytes,
            )
        return self.latest


def _unkept_pins_error(problem: Problem, buffers: Sequence[int]) -> UnsupportedProgramError:
    pins = (pin for number in buffers if (pin := problem.buffers[number].pin))
    names = ", ".join(sorted({f"{pin.name!r} to {pin.where.value!r}" for pin in pins}))
    return UnsupportedProgramError(
        f"no plan honours the pins {names} ({problem.buffers[buffers[0]].name}): a value can be "
        "recomputed only while its inputs exist and are not overwritten, and offloaded only within "
        "the host budget and between kernels of one computation. Pin it elsewhere, or leave it to "
        "the planner."
    )


_Decisions = tuple[list[Recomputation], list[Offload]]
"""The arguments of `Ledger.restore`."""


class _Constructed(NamedTuple):
    """A plan, ordered by its excess, then by its seconds."""

    excess: float
    seconds: float
    number: int  # of all plans that are compared
    recipe: Recipe
    decisions: _Decisions


class _OrderSearch:
    """Plans in one order of kernels.

    `_ledger` has the current plan, `_scheduler` its copies; the latter is None without offloads.
    """

    def __init__(self, search: _PlanSearch, order: Sequence[int]) -> None:
        self._search = search
        self._problem = search.problem
        self._effort = search.effort
        # without tables
        self._budget_nbytes = search.budget_nbytes - self._problem.tables_nbytes
        self._best: Solution | None = None
        # for eviction, the best first
        self.heuristics = self._effort.heuristics
        if not (search.copy_s and search.host_nbytes):
            self.heuristics = self._effort.heuristics_without_host
        tape = reconcile(self._problem, record(self._problem, order))
        self._ledger = Ledger(with_absent_slots(self._problem, tape))
        self._scheduler = self._new_scheduler()
        self._pinned = self._keep_pins()  # every plan begins with these decisions

    def unkept_pins(self) -> list[int]:
        """Buffers whose pins no plan keeps."""
        values = self._ledger.tape.values
        return [values[value].buffer for value in self._ledger.unkept_pins()]

    def _keep_pins(self) -> _Decisions:
        """The decisions that pins require, and no others."""
        ledger = self._ledger
        scheduler = self._scheduler
        values = ledger.tape.values
        if self._problem.moves_pinned:
            for value in ledger.unkept_pins() if scheduler else ():
                slot = values[value].absent_slot
                needs = ledger.needs[value]
                assert scheduler is not None and slot is not None
                reader = needs[bisect_left(needs, slot)]
                if offload := scheduler.shortest_residency(value, reader):
                    ledger.offload(offload)
            limit = ABSENT_PENALTY_NBYTES // 2
            pinned_first = [1.0 if value.absent_slot is None else 1e9 for value in values]
            effort = replace(self._effort, min_share=0.0)
            Eviction(ledger, limit, noise=pinned_first, effort=effort).run()
            prune(ledger, limit)
        return self._decisions()

    @property
    def floor_nbytes(self) -> int:
        """Lower bound on the bytes of a plan in this order."""
        return int(self._ledger.tape.floor_nbytes.max()) + self._problem.tables_nbytes

    def may_fit(self) -> bool:
        """Does the unchanged order fit, if the layout has no fragmentation?"""
        return self._ledger.peak_nbytes <= self._budget_nbytes

    def solution(self) -> Solution:
        """The ledger's plan."""
        schedule = tuple(action for actions in slot_actions(self._ledger) for action in actions)
        return self._search.solution(eliminate_dead(self._problem, schedule))

    def run(self) -> Solution:
        """Steps 2 to 5 of the header."""
        tape = self._ledger.tape
        limit = max(1, self._budget_nbytes, int(tape.floor_nbytes.max()))
        evicted = self._construct_evicted(limit)
        families = [evicted]
        if self._scheduler is not None and not self._is_close(min(evicted)):
            families.append(self._construct_streamed(evicted, limit))
        first, *slower = sorted(self._fastest_packed(family, limit) for family in families)
        self._improve(first, tape, limit)
        for start in slower:
            best = self._best
            may_improve = best is not None and (not best.fits or start.seconds < best.seconds)
            if may_improve and not first.excess:
                self._improve(start, tape, limit)
        return self._best or self.solution()

    def _improve(self, start: _Constructed, tape: Tape, limit: int) -> None:
        """Steps 3 to 5 of the header, from a constructed plan."""
        self._limit = limit
        self._ledger = Ledger(tape)
        self._scheduler = self._new_scheduler()
        self._ledger.restore(*start.decisions)
        # kernels stall for copies only if the limit is not kept otherwise
        if Eviction(self._ledger, limit, effort=self._effort).run() or self._relieve(limit):
            spare_nbytes = self._lower_limit(start.recipe)
            if spare_nbytes >= 0:
                limit = self._ledger.peak_nbytes + spare_nbytes
            search = self._neighbourhoods(limit)
            enough_s = self._effort.close * self._search.bound_s
            search.improve(self._over_nbytes, self._effort.evaluations, enough_s)

    def _construct_evicted(self, limit: int) -> list[_Constructed]:
        """Plans by eviction alone, one for each heuristic.

        Heuristics that do not keep this limit are not tried again.
        """
        plans = list[_Constructed]()
        evaluations = 0
        for heuristic in self.heuristics:
            recipe = Recipe(evict=heuristic)
            self._ledger.restore(*self._pinned)
            evaluations += self._construct(recipe, limit)
            plans.append(self._constructed(recipe, limit, len(plans)))
            is_enough = evaluations > self._effort.construction_evaluations
            if is_enough or self._is_close(plans[-1]):
                break
        fitting = (plan.recipe.evict for plan in plans if not plan.excess)
        fitting_heuristics = [heuristic for heuristic in fitting if heuristic]
        self.heuristics = fitting_heuristics or self.heuristics[:1]
        return plans

    def _is_close(self, plan: _Constructed) -> bool:
        """Whether no plan that keeps the limit can be much faster."""
        return not plan.excess and plan.seconds <= self._effort.close * self._search.bound_s

    def _construct_streamed(
        self,
        evicted: Sequence[_Constructed],
        limit: int,
    ) -> list[_Constructed]:
        """Streaming plans: of everything, or of the excess that eviction leaves.

        If eviction fits, also try it on top of stall-free streaming.
        """
        effort = self._effort
        recipes = [Recipe(stream=streaming) for streaming in effort.streamings]
        if not min(evicted).excess:
            recipes += effort.stall_free
        # the whole recipe, its steps that remain, the plan that these begin with
        variants = [(recipe, recipe, self._pinned) for recipe in recipes]
        for plan in evicted:
            for streaming in effort.streamings[:2] if plan.excess else ():
                recipe = plan.recipe._replace(stream=streaming)
                variants.append((recipe, Recipe(stream=streaming), plan.decisions))
        plans = list[_Constructed]()
        for recipe, steps, decisions in variants:
            self._ledger.restore(*decisions)
            self._construct(steps, limit)
            plans.append(self._constructed(recipe, limit, len(evicted) + len(plans)))
        return plans

    def _constructed(self, recipe: Recipe, limit: int, number: int) -> _Constructed:
        """The ledger's plan."""
        excess = Excess(limit).of(self._ledger.load)
        seconds = plan_seconds(self._ledger, self._scheduler)
        return _Constructed(excess, seconds, number, recipe, self._decisions())

    def _fastest_packed(self, plans: Sequence[_Constructed], limit: int) -> _Constructed:
        """The best plan, once packed.

        One percent of packed bytes above the limit counts as one percent of time: when bytes came
        first, the 3D U-Net on a P100 was 6 % slower at half its bytes.
        """
        packed = list[_Constructed]()
        for plan in sorted(plans):
            if packed:
                is_slower = plan.seconds >= min(packed).seconds
                if is_slower or plan.excess > packed[0].excess:
                    break  # packed, it can only be worse
            self._ledger.restore(*plan.decisions)
            seconds = plan.seconds * (1 + self._over_nbytes() / limit)
            packed.append(plan._replace(seconds=seconds))
        return min(packed)

    def _construct(self, recipe: Recipe, limit: int) -> int:
        """Bring the ledger's plan under the limit, as far as the recipe does.

        Returns:
          The number of evaluations.
        """
        ledger = self._ledger
        scheduler = self._scheduler
        min_nbytes = int(self._effort.min_share * limit)
        evaluations = 0
        if recipe.stall_free and scheduler:
            stream(ledger, scheduler, limit, recipe.stall_free, min_nbytes)
            while stalls_s := scheduler.links.stalls_s:
                count = 1 + len(stalls_s) // self._effort.undone_part
                for offload in itertools.islice(stalls_s, count):
                    if (offload.value, offload.prefetch) in ledger.offloads:
                        undo_offload(ledger, offload)
                scheduler.refresh()
        if recipe.evict:
            eviction = self._eviction(limit, recipe.evict)
            eviction.run()
            prune(ledger, limit)
            evaluations = eviction.evaluations
        if recipe.stream and scheduler and ledger.peak_nbytes > limit:
            stream(ledger, scheduler, limit, recipe.stream, min_nbytes)
        if self._problem.moves_pinned and scheduler:
            overlap_copies(ledger, scheduler, limit)
        return evaluations

    def _relieve(self, limit: int) -> bool:
        """Step 3 of the header, if eviction gets stuck; True if the limit is kept."""
        for _ in range(self._effort.empty_slot_rounds):
            self._eviction(limit).run()
            if self._neighbourhoods(limit).reach_limit(self._effort.evaluations // 4):
                return True
            self._insert_empty_slots(limit)
        return False

    def _insert_empty_slots(self, limit: int) -> None:
        """Insert an empty slot before each slot above the limit, and move its prelude there.

        Slots without a prelude stay as they are.
        """
        ledger = self._ledger
        crowded = np.flatnonzero(ledger.load > limit).tolist()
        slots = [slot for slot in crowded if ledger.preludes[slot]]
        decisions = self._decisions()
        numbers = np.arange(len(ledger.slack))
        new_numbers = numbers + np.searchsorted(slots, numbers, side="right")
        self._ledger = Ledger(ledger.tape.with_empty_slots(frozenset(slots)))
        slack = np.zeros(self._ledger.tape.count, np.int64)
        slack[new_numbers] = ledger.slack
        self._ledger.set_slack(slack)
        new_slot = new_numbers.tolist()

        def shifted(decisions: _Decisions) -> _Decisions:
            recomputations, offloads = decisions
            moved = []
            for offload in offloads:
                start = None if offload.start is None else new_slot[offload.start]
                end = new_slot[offload.end]
                moved.append(Offload(offload.value, start, end, new_slot[offload.prefetch]))
            return [(op, new_slot[slot] - (slot in slots)) for op, slot in recomputations], moved

        self._pinned = shifted(self._pinned)
        self._ledger.restore(*shifted(decisions))
        self._scheduler = self._new_scheduler()

    def _lower_limit(self, recipe: Recipe) -> int:
        """Step 4 of the header.

        Returns:
          The bytes that the closest plan leaves of the budget; negative if it exceeds the budget.
        """
        plans = []
        for _ in range(self._effort.limits):
            prune(self._ledger, self._limit)
            spare_nbytes = self._spare_nbytes()
            if spare_nbytes >= 0:
                return spare_nbytes
            plans.append((-spare_nbytes, len(plans), *self._decisions()))
            self._reconcile()
            floor_nbytes = int((self._ledger.tape.floor_nbytes + self._ledger.slack).max())
            bound = min(self._limit, self._ledger.peak_nbytes) + spare_nbytes
            self._limit = max(1, floor_nbytes, bound)
            if -spare_nbytes * self._effort.adjusted_part > self._search.budget_nbytes:
                if recipe.stall_free or recipe.stream:
                    self._ledger.restore(*self._pinned)
                else:
                    evicted = self._construct_evicted(self._limit)
                    best = self._fastest_packed(evicted, self._limit)
                    self._ledger.restore(*best.decisions)
                    recipe = best.recipe
            self._construct(recipe._replace(stream=self._effort.streamings[0]), self._limit)
            if not Eviction(self._ledger, self._limit, effort=self._effort).run():
                break
        over_nbytes, _, recomputations, offloads = min(plans)
        self._ledger.restore(recomputations, offloads)
        return -over_nbytes

    def _reconcile(self) -> None:
        """Add the difference between each slot's packed layout and its load to its slack."""
        actions_by_slot = slot_actions(self._ledger)
        schedule = tuple(action for actions in actions_by_slot for action in actions)
        packed_nbytes = live_nbytes(self._problem, schedule)
        slack = self._ledger.slack.copy()
        begin = 0
        for slot, actions in enumerate(actions_by_slot):
            end = begin + len(actions)
            if actions:
                slack[slot] += packed_nbytes[begin:end].max() - self._ledger.load[slot]
            begin = end
        self._ledger.set_slack(slack)

    def _spare_nbytes(self) -> int:
        """Bytes of the budget that the packed plan leaves; negative if it exceeds the budget."""
        solution = self.solution()
        self._best = solution if self._best is None else min(self._best, solution, key=rank)
        return self._search.budget_nbytes - solution.nbytes

    def _over_nbytes(self) -> int:
        return max(0, -self._spare_nbytes())

    def _eviction(self, limit: int, heuristic: Heuristic | None = None) -> Eviction:
        """An eviction on the ledger.

        With a heuristic it may make offloads that stall no kernel, if the heuristic has a price for
        them; without one, all offloads.
        """
        ledger = self._ledger
        scheduler = self._scheduler
        if scheduler is not None:
            scheduler.refresh()
        if heuristic is None:
            return Eviction(ledger, limit, scheduler=scheduler, effort=self._effort)
        return Eviction(
            ledger,
            limit,
            heuristic.power,
            scheduler if heuristic.idle_price else None,
            heuristic.idle_price,
            may_stall=False,
            effort=self._effort,
        )

    def _neighbourhoods(self, limit: int) -> NeighbourhoodSearch:
        return NeighbourhoodSearch(self._ledger, limit, self._scheduler, effort=self._effort)

    def _decisions(self) -> _Decisions:
        """The ledger's plan, for `Ledger.restore`."""
        offloads = self._ledger.offloads
        return self._ledger.recomputations(), [offloads[key] for key in sorted(offloads)]

    def _new_scheduler(self) -> CopyScheduler | None:
        copy_s = self._search.copy_s
        host_nbytes = self._search.host_nbytes
        return CopyScheduler(self._ledger, copy_s, host_nbytes) if copy_s and host_nbytes else None
