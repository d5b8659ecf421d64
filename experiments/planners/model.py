"""The exact model: which items are recomputed, and where, as a problem for CP-SAT.

The events of an item are its first computation, its uses, and its possible recomputations and those
of its dependents. One variable for each gap between two events says whether the item is kept across
the gap (the retention intervals of MOCCASIN: Bartan et al., ICML 2023). The bytes during a stage's
own work are then a linear sum. The bytes during recomputations are not, so their constraints are
added lazily: where a solution breaks them, they are added and the model is solved again. A good
plan recomputes few items, so few of these constraints are needed, and the bound of every round is
valid.

Part of a plan may be fixed, so the same model also serves as the neighbourhood of a local search.
"""

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from experiments.planners.stages import Recomputation, Stages, extra_ticks, replay

Literal = cp_model.IntVar | bool
_Gap = tuple[int, int, int, cp_model.IntVar]
"""First stage, the stage after the last, bytes, and whether the item is kept."""


@dataclass(frozen=True)
class Choice:
    """A solution of a model."""

    recomputed: frozenset[Recomputation] | None  # by the whole plan; None if no plan was found
    extra_ticks: int  # time of the recomputations
    bound_ticks: int  # lower bound on the extra time of every solution
    proven: bool  # the solution is optimal, or there is none


def all_recomputations(stages: Stages, most_ticks: int | None = None) -> set[Recomputation]:
    """All recomputations that a plan with at most this much extra time can use."""
    return {
        (item, stage)
        for item, ticks in enumerate(stages.ticks)
        if ticks is not None and (most_ticks is None or ticks <= most_ticks)
        for stage in range(stages.home[item] + 1, stages.last_need[item] + 1)
    }


class Model:
    """Chooses recomputations among `free`; those in `fixed` are always part of the plan.

    The stages in `excess` may exceed the budget by that many bytes. Each such byte costs more than
    all recomputations together.
    """

    def __init__(
        self,
        stages: Stages, free: Collection[Recomputation], fixed: Iterable[Recomputation] = (),
        hint: Collection[Recomputation] = (), excess: Mapping[int, int] | None = None,
    ):  # fmt: skip
        self.stages = stages
        self.fixed = frozenset(fixed)
        self.solver_model = cp_model.CpModel()
        self.possible = True
        self.allowed = dict(excess or {})
        self.excess = {
            stage: self.solver_model.new_int_var(0, allowance, "")
            for stage, allowance in self.allowed.items()
        }
        self.recomputed: dict[Recomputation, Literal] = dict.fromkeys(self.fixed, True)
        for item, stage in sorted(free):
            self.recomputed[item, stage] = self.solver_model.new_bool_var("")
        self.free = {
            pair: var for pair, var in self.recomputed.items() if not isinstance(var, bool)
        }
        self.stages_of: dict[int, list[int]] = {}
        for item, stage in sorted(self.recomputed):
            self.stages_of.setdefault(item, []).append(stage)
        self.rest = _Fixed(stages, self.fixed)
        self.involved = {item for item, _ in self.free}
        self.involved.update(
            source for item in tuple(self.involved) for source in stages.inputs[item]
        )
        self.events: dict[int, list[int]] = {}
        # (item, event) -> the item is kept from its previous event until this one
        self.kept: dict[tuple[int, int], Literal] = {}
        for item in sorted(self.involved):
            self._add_item(item)
        self._add_memory()
        prices = [stages.ticks[item] or 0 for item, _ in self.free]
        self.extra = cp_model.LinearExpr.weighted_sum(list(self.free.values()), prices)
        self.fixed_ticks = extra_ticks(stages, self.fixed)
        excess_price = (
            1 + sum(stages.ticks[item] or 0 for item, _ in self.free) if self.excess else 0
        )
        self.solver_model.minimize(
            self.extra + excess_price * cp_model.LinearExpr.sum(list(self.excess.values()))
        )
        self.watched: set[Recomputation] = set()
        self._hint(frozenset(hint))

    def _hint(self, chosen: frozenset[Recomputation]) -> None:
        if not chosen:
            return
        spans = replay(self.stages, self.fixed.union(chosen)).spans
        self.solver_model.clear_hints()
        for pair, var in self.free.items():
            self.solver_model.add_hint(var, pair in chosen)
        for (item, event), var in self.kept.items():
            if not isinstance(var, bool):
                self.solver_model.add_hint(
                    var, any(first < event <= last for first, last in spans[item])
                )

    def at_most(self, extra_ticks: int) -> None:
        """Allow only plans with at most this much extra time, including the fixed part."""
        self.solver_model.add(self.extra <= extra_ticks - self.fixed_ticks)

    def watch(self, steps: Iterable[Recomputation]) -> None:
        """Constrain the bytes during these recomputations from the first round on."""
        for item, stage in steps:
            if (item, stage) in self.recomputed and (item, stage) not in self.watched:
                self.watched.add((item, stage))
                self._add_step(item, stage)

    def solve(self, seconds: float, workers: int = 2, seed: int = 0) -> Choice:
        """The best choice found in time; every plan that is returned has been replayed and fits."""
        until = time.monotonic() + seconds
        bound = 0
        while self.possible:
            solver = cp_model.CpSolver()
            solver.parameters.num_workers = workers
            solver.parameters.random_seed = seed
            solver.parameters.max_time_in_seconds = max(0.05, until - time.monotonic())
            status = solver.solve(self.solver_model)
            if status == cp_model.INFEASIBLE:
                break
            bound = (
                bound
                if self.excess
                else max(bound, int(np.ceil(solver.best_objective_bound - 1e-6)))
            )
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                return Choice(None, 0, bound + self.fixed_ticks, False)
            chosen = frozenset(pair for pair, var in self.free.items() if solver.boolean_value(var))
            recomputed = self.fixed | chosen
            played = replay(self.stages, recomputed)
            sized = zip(played.steps, played.step_nbytes, strict=True)
            budget = self.stages.budget_bytes
            broken = [
                step for step, nbytes in sized if nbytes > budget + self.allowed.get(step[0], 0)
            ]
            if not broken:
                extra = extra_ticks(self.stages, recomputed)
                return Choice(
                    recomputed, extra, bound + self.fixed_ticks, status == cp_model.OPTIMAL
                )
            fresh = [
                (item, stage)
                for stage, item in broken
                if item >= 0 and (item, stage) not in self.watched
            ]
            if not fresh or time.monotonic() > until:
                return Choice(None, 0, bound + self.fixed_ticks, False)
            self.watch(fresh)
            self._hint(chosen)
        return Choice(None, 0, bound + self.fixed_ticks, True)

    def _add_item(self, item: int) -> None:
        stages, home = self.stages, self.stages.home[item]
        used = set(stages.uses[item])
        needs: dict[int, list[Literal]] = {stage: [True] for stage in used}
        for dependent in stages.dependents[item]:
            for stage in self.stages_of.get(dependent, ()):
                needs.setdefault(stage, []).append(self.recomputed[dependent, stage])
        events = sorted({home, *needs, *self.stages_of.get(item, ())})
        self.events[item] = events
        before: list[Literal] = [True]  # any of these: live after the previous event
        for event in events[1:]:
            recomputed = self.recomputed.get((item, event), False)
            kept: Literal = self.solver_model.new_bool_var("")
            if recomputed is True:
                kept = False
            elif recomputed is False and event in used:
                kept = True
            self.kept[item, event] = kept
            self._clause([_not(kept), *before])
            self._clause([_not(kept), _not(recomputed)])
            for need in needs.get(event, ()):
                self._clause([_not(need), kept, recomputed])
            before = [kept, recomputed]

    def _clause(self, literals: Sequence[cp_model.LiteralT]) -> None:
        if any(literal is True for literal in literals):
            return
        open_literals = [literal for literal in literals if literal is not False]
        if not open_literals:
            self.possible = False
        self.solver_model.add_bool_or(open_literals)

    def _add_memory(self) -> None:
        """Constrain the own work of each stage where the choices can break the budget."""
        base, gaps = self._memory()
        room = self.stages.budget_bytes - base
        limit = room.copy()
        for stage, nbytes in self.allowed.items():
            limit[stage] += nbytes
        if (limit < 0).any():
            self.possible = False
        change = np.zeros(self.stages.count + 1)
        for first, end, nbytes, _ in gaps:
            change[first] += nbytes
            change[end] -= nbytes
        crowded = np.cumsum(change)[:-1] > room
        apart = [edge for stage in self.excess for edge in (stage, stage + 1)]
        edges = np.unique([*apart, *(edge for first, end, *_ in gaps for edge in (first, end))])
        gaps.sort(key=lambda gap: gap[0])
        live: dict[int, _Gap] = {}
        coming = 0
        for low, high in pairwise(edges.tolist()):
            while coming < len(gaps) and gaps[coming][0] <= low:
                live[coming] = gaps[coming]
                coming += 1
            live = {number: gap for number, gap in live.items() if gap[1] > low}
            if crowded[low:high].any():
                _, _, sizes, variables = (
                    zip(*live.values(), strict=True) if live else ((), (), (), ())
                )
                total = cp_model.LinearExpr.weighted_sum(variables, sizes)
                self.solver_model.add(total <= int(room[low:high].min()) + self.excess.get(low, 0))

    def _memory(self) -> tuple[np.ndarray, list[_Gap]]:
        """The bytes of each stage's own work that no choice changes, and the variable gaps."""
        stages = self.stages
        base = self.rest.own_nbytes(self.involved).astype(float)
        gaps: list[_Gap] = []
        for item in self.involved:
            nbytes, used = stages.nbytes[item], set(stages.uses[item])
            base[stages.home[item]] += nbytes
            for stage in used:
                base[stage] += nbytes
            events = self.events[item]
            for index, event in enumerate(events[1:]):
                earlier = events[index]
                first = earlier + (earlier == stages.home[item] or earlier in used)
                kept = self.kept[item, event]
                if kept is True:
                    base[first:event] += nbytes
                elif kept is not False and first < event:
                    gaps.append((first, event, nbytes, kept))
        return base, gaps

    def _into(self, item: int, stage: int) -> Literal:
        """Whether the item is live when the stage begins."""
        events = self.events.get(item)
        if events is None:
            return self.rest.into(item, stage)
        if stage <= events[0]:
            return False
        index = bisect_left(events, stage)
        return False if index == len(events) else self.kept[item, events[index]]

    def _add_step(self, item: int, stage: int) -> None:
        """Constrain the bytes while `item` is recomputed in `stage`."""
        stages = self.stages
        sources = stages.inputs[item]
        room = (
            stages.budget_bytes
            - stages.nbytes[item]
            - sum(stages.nbytes[source] for source in sources)
        )
        terms: list[tuple[int, cp_model.IntVar]] = []
        for resident in self._around(stage):
            if resident == item or resident in sources or stages.home[resident] >= stage:
                continue
            needs: list[Literal] = [self._into(resident, stage + 1), stage in stages.uses[resident]]
            later = (
                (dependent, stage) for dependent in stages.dependents[resident] if dependent > item
            )
            needs += [self.recomputed[pair] for pair in later if pair in self.recomputed]
            # a later item that this stage recomputes is not live yet
            absent = self.recomputed.get((resident, stage), False) if resident > item else False
            live = self._live([need for need in needs if need is not False], absent)
            if live is True:
                room -= stages.nbytes[resident]
            elif live is not False:
                terms.append((stages.nbytes[resident], live))
        total = cp_model.LinearExpr.weighted_sum(
            [live for _, live in terms], [nbytes for nbytes, _ in terms]
        )
        recomputed = self.recomputed[item, stage]
        if not isinstance(recomputed, bool) and room < 0 and stage not in self.excess:
            self.solver_model.add(recomputed == 0)
            return
        constraint = self.solver_model.add(total <= room + self.excess.get(stage, 0))
        if not isinstance(recomputed, bool):
            constraint.only_enforce_if(recomputed)

    def _live(self, needs: list[Literal], absent: Literal) -> Literal:
        if absent is True or not needs:
            return False
        if absent is False and any(need is True for need in needs):
            return True
        if absent is False and len(needs) == 1:
            return needs[0]
        live: Literal = self.solver_model.new_bool_var("")
        for need in needs:
            self._clause([live, _not(need), absent])
        return live

    def _around(self, stage: int) -> set[int]:
        """Items that may be live in a stage."""
        events = self.events.items()
        return self.rest.around(stage) | {item for item, at in events if at[0] < stage <= at[-1]}


def _not(literal: Literal) -> cp_model.LiteralT:
    return (not literal) if isinstance(literal, bool) else ~literal


class _Fixed:
    """The fixed part of the plan: where copies are live under the fixed recomputations alone."""

    def __init__(self, stages: Stages, fixed: frozenset[Recomputation]):
        self.stages = stages
        self.spans = replay(stages, fixed).spans
        flat = [(item, *span) for item, spans in enumerate(self.spans) for span in spans]
        self.item, self.first, self.last = (
            np.array(column, dtype=np.int64) for column in zip(*flat, strict=True)
        )
        self.nbytes = np.array(stages.nbytes, dtype=np.int64)[self.item]

    def own_nbytes(self, without: Collection[int]) -> np.ndarray:
        """Bytes during the own work of each stage, without some items."""
        counted = ~np.isin(self.item, np.fromiter(without, dtype=np.int64, count=len(without)))
        # a copy last read by a recomputation is freed before the stage's own work
        pairs, stages = zip(self.item.tolist(), self.last.tolist(), strict=True), self.stages
        end = self.last + np.array(
            [last == stages.home[item] or last in stages.uses[item] for item, last in pairs]
        )
        change = np.zeros(self.stages.count + 1, dtype=np.int64)
        np.add.at(change, self.first[counted], self.nbytes[counted])
        np.subtract.at(change, end[counted], self.nbytes[counted])
        return np.array(self.stages.working_nbytes, dtype=np.int64) + np.cumsum(change)[:-1]

    def into(self, item: int, stage: int) -> bool:
        return any(first < stage <= last for first, last in self.spans[item])

    def around(self, stage: int) -> set[int]:
        return set(self.item[(self.first <= stage) & (stage <= self.last)].tolist())
