"""Large-neighbourhood search (Shaw, CP 1998): destroy a part of a plan, let the exact model repair it, keep the better.

A neighbourhood is the recomputations in a run of stages, or those that bridge one crowded stage: the ones of the plan,
and those that could take their place. Its size follows what the solver finishes in its share of the time.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from experiments.planners.model import Effort, Model
from experiments.planners.stages import Recomputation, Replay, Stages, extra_ticks, replay

_FIRST_SIZE = 250
_LEAST_SIZE = 60
_MOST_SIZE = 6000
_NEARLY_FULL = 0.96  # of the budget: stages where bytes could be worth something
_DEPTH = 3


@dataclass
class NeighbourhoodSearch:
    """A local search over recomputations that fit.

    Attributes:
      recomputed: the best plan so far.
      bound_ticks: stop when the plan is this good.
      share_s: time for one neighbourhood.
      patience: rounds without gain before it gives up.
    """

    stages: Stages
    recomputed: frozenset[Recomputation]
    bound_ticks: int = 0
    workers: int = 2
    share_s: float = 3.0
    patience: int = 10**9
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
            left = until - time.monotonic()
            if left < 0.1:
                break
            better = self._round(min(self.share_s, left))
            self.stale = 0 if better else self.stale + 1
        return self.recomputed

    def _survey(self) -> None:
        """What the neighbourhoods are cut from."""
        stages = self.stages
        played: Replay = replay(stages, self.recomputed)
        self.spans = played.spans
        near = np.zeros(stages.count, dtype=bool)
        self.excess: dict[int, int] = {}
        for (stage, _), nbytes in zip(played.steps, played.step_nbytes, strict=True):
            near[stage] |= nbytes > _NEARLY_FULL * stages.budget_bytes
            if nbytes > stages.budget_bytes:
                self.excess[stage] = max(self.excess.get(stage, 0), nbytes - stages.budget_bytes)
        for (stage, _), nbytes in zip(*_kept(stages), strict=True):
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
        effort = Effort(seconds, self.workers, self.random.randrange(1 << 20))
        choice = model.solve(effort)
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
        """Repetitions to be chosen anew, about as many as `size`."""
        centre = self._centre()
        if self.random.random() < 0.5:
            return self._run_of_stages(centre)
        return self._across(centre)

    def _centre(self) -> int:
        if self.excess:
            return self.random.choice(sorted(self.excess))
        if self.hot and self.random.random() < 0.5:
            return self.random.choice(self.hot)
        return self.random.choice(sorted(self.recomputed))[1]

    def _run_of_stages(self, centre: int) -> set[Recomputation]:
        """Everything worth recomputing from a stage to another around the centre."""
        free: set[Recomputation] = set()
        low = high = centre
        stages = self.stages
        owned: dict[int, list[Recomputation]] = {}
        for pair in self.recomputed:
            owned.setdefault(pair[1], []).append(pair)
        while len(free) < self.size and (low > 0 or high < stages.count - 1):
            for stage in {low, high}:
                free.update(owned.get(stage, ()))
                for item in stages.reads[stage]:
                    self._add(free, item, stage, 0)
            low, high = max(0, low - 1), min(stages.count - 1, high + 1)
        return free

    def _across(self, centre: int) -> set[Recomputation]:
        """Repetitions that bring back what could be absent at the centre."""
        free: set[Recomputation] = set()
        items = [item for item, spans in enumerate(self.spans) if spans[0][0] < centre < self._end(item)]
        self.random.shuffle(items)
        for item in items:
            if len(free) >= self.size:
                break
            free.update(pair for pair in ((item, stage) for stage in self._own(item)) if pair in self.recomputed)
            needs = self.needs[item]
            index = bisect_left(needs, centre)
            for need in needs[index : index + 3]:
                self._add(free, item, need, 0)
        # what the plan recomputes behind the centre holds its inputs across it
        owned = sorted((pair for pair in self.recomputed if pair[1] >= centre), key=lambda pair: pair[1])
        free.update(owned[: max(8, int(self.size / 6))])
        return free

    def _end(self, item: int) -> int:
        return max(self.needs[item], default=-1)

    def _own(self, item: int) -> list[int]:
        return [first for first, _ in self.spans[item]]

    def _add(self, free: set[Recomputation], item: int, stage: int, depth: int) -> None:
        """A recomputation, and those it may be computed from."""
        stages = self.stages
        ticks, home = stages.ticks[item], stages.home[item]
        if (
            ticks is None
            or ticks > max(self.cost, self.most_ticks if self.excess else 0)
            or stage <= home
            or (item, stage) in free
        ):
            return
        if not depth:
            needs = self.needs[item]
            index = bisect_left(needs, stage)
            before = needs[index - 1] if index else home
            if self.near[stage] == self.near[before + 1 if before < stage else stage]:
                return  # nothing crowded in the gap
        free.add((item, stage))
        if depth < _DEPTH and self.random.random() < 0.8:
            for source in stages.inputs[item]:
                absent = not any(first <= stage <= last for first, last in self.spans[source])
                if absent or self.random.random() < 0.2:
                    self._add(free, source, stage, depth + 1)


def _kept(stages: Stages) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    played = replay(stages, ())
    return played.steps, played.step_nbytes
