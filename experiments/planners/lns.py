"""Large-neighbourhood search (Shaw, CP 1998): free part of a plan; the exact model repairs it.

A neighbourhood holds the recomputations in a run of stages, or those that bridge one crowded stage:
the plan's own, and those that could replace them. Its size adapts to what the solver can finish in
its share of the time.
"""

import random
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from experiments.planners.model import Model
from experiments.planners.stages import Recomputation, Stages, extra_ticks, replay

_FIRST_SIZE, _MIN_SIZE, _MAX_SIZE = 250, 60, 6000  # recomputations in a neighbourhood
_NEARLY_FULL = 0.96  # A stage above this share of the budget counts as crowded.
_DEPTH = 3  # How many inputs deep a neighbourhood follows a recomputation.


@dataclass
class NeighbourhoodSearch:
    """A local search over sets of recomputations that fit."""

    stages: Stages
    recomputed: frozenset[Recomputation]  # of the best plan so far
    bound_ticks: int = 0  # stop at this extra time
    workers: int = 2
    share_s: float = 3.0  # time for one neighbourhood
    patience: int = 10**9  # rounds without gain before stopping
    size: float = _FIRST_SIZE

    def run(self, seconds: float) -> frozenset[Recomputation]:
        """Improve the plan until the time is over or the bound is reached."""
        self.random = random.Random(0)
        until = time.monotonic() + seconds
        self.cost = extra_ticks(self.stages, self.recomputed)
        self.most_ticks = sum(self.stages.own_ticks)
        self._survey()
        self.stale = 0
        while self.stale < self.patience and (self.excess or self.cost > self.bound_ticks):
            if (remaining := until - time.monotonic()) < 0.1:
                break
            self.stale = 0 if self._round(min(self.share_s, remaining)) else self.stale + 1
        return self.recomputed

    def _survey(self) -> None:
        """Note crowded stages and needs, from which neighbourhoods are cut."""
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
            self.size = min(_MAX_SIZE, self.size * 1.2)
        elif not choice.proven:
            self.size = max(_MIN_SIZE, self.size * 0.8)
        if choice.recomputed is None or (choice.extra_ticks > self.cost and not self.excess):
            return False
        better = choice.extra_ticks < self.cost or bool(self.excess)
        if choice.recomputed != self.recomputed:
            self.recomputed, self.cost = choice.recomputed, choice.extra_ticks
            self._survey()
        return better

    def _neighbourhood(self) -> set[Recomputation]:
        """About `size` recomputations for the model to choose from."""
        if self.excess:
            centre = self.random.choice(sorted(self.excess))
        elif self.hot and self.random.random() < 0.5:
            centre = self.random.choice(self.hot)
        else:
            centre = self.random.choice(sorted(self.recomputed))[1]
        return self._run_of_stages(centre) if self.random.random() < 0.5 else self._across(centre)

    def _run_of_stages(self, centre: int) -> set[Recomputation]:
        """Everything worth recomputing in a run of stages around the centre."""
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
        """Recomputations of items that could be dropped at the centre."""
        free, needed = set[Recomputation](), [max(needs, default=-1) for needs in self.needs]
        items = [
            item for item, spans in enumerate(self.spans) if spans[0][0] < centre < needed[item]
        ]
        self.random.shuffle(items)
        for item in items:
            if len(free) >= self.size:
                break
            free.update({(item, first) for first, _ in self.spans[item]} & self.recomputed)
            index = bisect_left(self.needs[item], centre)
            for need in self.needs[item][index : index + 3]:
                self._add(free, item, need, 0)
        # recomputations after the centre keep their inputs live across it
        owned = sorted(
            (pair for pair in self.recomputed if pair[1] >= centre), key=lambda pair: pair[1]
        )
        free.update(owned[: max(8, int(self.size / 6))])
        return free

    def _add(self, free: set[Recomputation], item: int, stage: int, depth: int) -> None:
        """Add a recomputation, and recomputations of its inputs."""
        stages = self.stages
        ticks, home = stages.ticks[item], stages.home[item]
        most_ticks = max(self.cost, self.most_ticks if self.excess else 0)
        if ticks is None or ticks > most_ticks or stage <= home or (item, stage) in free:
            return
        if not depth:
            index = bisect_left(self.needs[item], stage)
            before = self.needs[item][index - 1] if index else home
            if self.near[stage] == self.near[before + 1 if before < stage else stage]:
                return  # no crowded stage in the gap
        free.add((item, stage))
        if depth < _DEPTH and self.random.random() < 0.8:
            for source in stages.inputs[item]:
                absent = not any(first <= stage <= last for first, last in self.spans[source])
                if absent or self.random.random() < 0.2:
                    self._add(free, source, stage, depth + 1)
