"""Large-neighbourhood search (Shaw, CP 1998): destroy a part of a plan, let the exact model repair it, keep the better.

A neighbourhood is the recomputations in a run of stages, or those that bridge one crowded stage: the ones of the plan,
and those that could take their place. Its size follows what the solver finishes in its share of the time.
"""

import random
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from experiments.planners.model import Model
from experiments.planners.stages import Recomputation, Stages, extra_ticks, replay

_FIRST_SIZE = 250
_LEAST_SIZE = 60
_MOST_SIZE = 6000
_NEARLY_FULL = 0.96  # of the budget: stages where bytes could be worth something
_DEPTH = 3


@dataclass
class NeighbourhoodSearch:
    """A local search over recomputations that fit."""

    stages: Stages
    recomputed: frozenset[Recomputation]  # by the best plan so far
    bound_ticks: int = 0  # stop when the plan is this good
    workers: int = 2
    share_s: float = 3.0  # for one neighbourhood
    patience: int = 10**9  # rounds without gain before it gives up
    size: float = _FIRST_SIZE

    def run(self, seconds: float) -> frozenset[Recomputation]:
        """Improve until the time is over or nothing is left to gain."""
        self.random = random.Random(0)
        until = time.monotonic() + seconds
        self.cost = extra_ticks(self.stages, self.recomputed)
        self.most_ticks = sum(self.stages.own_ticks)
        self._survey()
        self.stale = 0
        while self.stale < self.patience and (self.excess or self.cost > self.bound_ticks):
            if (left := until - time.monotonic()) < 0.1:
                break
            self.stale = 0 if self._round(min(self.share_s, left)) else self.stale + 1
        return self.recomputed

    def _survey(self) -> None:
        """What the neighbourhoods are cut from."""
        stages = self.stages
        played, kept = replay(stages, self.recomputed), replay(stages, ())
        self.spans = played.spans
        near = np.zeros(stages.count, dtype=bool)
        self.excess: dict[int, int] = {}
        for (stage, _), nbytes in zip(played.steps, played.step_nbytes, strict=True):
            near[stage] |= nbytes > _NEARLY_FULL * stages.budget_bytes
            if nbytes > stages.budget_bytes:
                self.excess[stage] = max(self.excess.get(stage, 0), nbytes - stages.budget_bytes)
        for (stage, _), nbytes in zip(kept.steps, kept.step_nbytes, strict=True):
            near[stage] |= nbytes > stages.budget_bytes
        self.near = np.concatenate([[0], np.cumsum(near)])
        self.hot = np.flatnonzero(near).tolist()
        self.needs: list[list[int]] = [list(uses) for uses in stages.uses]
        for item, stage in self.recomputed:
            for source in stages.inputs[item]:
                self.needs[source].append(stage)
        self.needs = [sorted(set(needs)) for needs in self.needs]

    def _round(self, seconds: float) -> bool:
        free = self._neighbourhood()
        own = free & self.recomputed
        if not own:
            return False
        started = time.monotonic()
        model = Model(self.stages, free, self.recomputed - free, own, self.excess)
        if not self.excess:
            model.at_most(self.cost)
        model.watch(own)
        choice = model.solve(seconds, self.workers, self.random.randrange(1 << 20))
        spent = time.monotonic() - started
        if choice.proven and spent < 0.3 * self.share_s:
            self.size = min(_MOST_SIZE, self.size * 1.2)
        elif not choice.proven:
            self.size = max(_LEAST_SIZE, self.size * 0.8)
        if choice.recomputed is None or (choice.extra_ticks > self.cost and not self.excess):
            return False
        better = choice.extra_ticks < self.cost or bool(self.excess)
        if choice.recomputed != self.recomputed:
            self.recomputed, self.cost = choice.recomputed, choice.extra_ticks
            self._survey()
        return better

    def _neighbourhood(self) -> set[Recomputation]:
        """About `size` recomputations to choose from again."""
        if self.excess:
            centre = self.random.choice(sorted(self.excess))
        elif self.hot and self.random.random() < 0.5:
            centre = self.random.choice(self.hot)
        else:
            centre = self.random.choice(sorted(self.recomputed))[1]
        return self._run_of_stages(centre) if self.random.random() < 0.5 else self._across(centre)

    def _run_of_stages(self, centre: int) -> set[Recomputation]:
        """Everything worth recomputing from a stage to another around the centre."""
        free, stages, low, high = set[Recomputation](), self.stages, centre, centre
        owned = defaultdict[int, list[Recomputation]](list)
        for pair in self.recomputed:
            owned[pair[1]].append(pair)
        while len(free) < self.size and (low > 0 or high < stages.count - 1):
            for stage in {low, high}:
                free.update(owned[stage])
                for item in stages.reads[stage]:
                    self._add(free, item, stage, 0)
            low, high = max(0, low - 1), min(stages.count - 1, high + 1)
        return free

    def _across(self, centre: int) -> set[Recomputation]:
        """Recomputations of items that could be absent at the centre."""
        free, needed = set[Recomputation](), [max(needs, default=-1) for needs in self.needs]
        items = [item for item, spans in enumerate(self.spans) if spans[0][0] < centre < needed[item]]
        self.random.shuffle(items)
        for item in items:
            if len(free) >= self.size:
                break
            free.update({(item, first) for first, _ in self.spans[item]} & self.recomputed)
            index = bisect_left(self.needs[item], centre)
            for need in self.needs[item][index : index + 3]:
                self._add(free, item, need, 0)
        # what the plan recomputes behind the centre holds its inputs across it
        owned = sorted((pair for pair in self.recomputed if pair[1] >= centre), key=lambda pair: pair[1])
        free.update(owned[: max(8, int(self.size / 6))])
        return free

    def _add(self, free: set[Recomputation], item: int, stage: int, depth: int) -> None:
        """A recomputation, and those it may be computed from."""
        stages = self.stages
        ticks, home = stages.ticks[item], stages.home[item]
        most_ticks = max(self.cost, self.most_ticks if self.excess else 0)
        if ticks is None or ticks > most_ticks or stage <= home or (item, stage) in free:
            return
        if not depth:
            index = bisect_left(self.needs[item], stage)
            before = self.needs[item][index - 1] if index else home
            if self.near[stage] == self.near[before + 1 if before < stage else stage]:
                return  # nothing crowded in the gap
        free.add((item, stage))
        if depth < _DEPTH and self.random.random() < 0.8:
            for source in stages.inputs[item]:
                absent = not any(first <= stage <= last for first, last in self.spans[source])
                if absent or self.random.random() < 0.2:
                    self._add(free, source, stage, depth + 1)
