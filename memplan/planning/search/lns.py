"""Large-neighbourhood search (Shaw, CP 1998): undo a part of a plan, repair it, keep improvements.

Repairs are evictions. A neighbourhood is a stretch of slots, the dearest decisions, or random ones;
repairs differ by noise, by the weight of the fullest slots, and by the price of an idle link, all
drawn at random each time.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.search.effort import DEFAULT, Effort
from memplan.planning.search.evict import Eviction, prune, undo_offload
from memplan.planning.search.ledger import Ledger, Offload, Recomputation
from memplan.planning.search.links import CopyScheduler, plan_seconds

Decision = Recomputation | Offload


@dataclass
class NeighbourhoodSearch:
    """A search around the plan of a ledger, which keeps the limit."""

    ledger: Ledger
    limit: int
    scheduler: CopyScheduler | None = None  # of offloads; None: no offloads
    seed: int = 0
    effort: Effort = DEFAULT

    def improve(
        self, over_nbytes: Callable[[], int], evaluations: int, enough_s: float = 0.0
    ) -> None:
        """Search for a plan that fits, then for a faster one, until this many gaps were evaluated.

        Until a plan fits, a repair's limit is the best plan's peak less a fraction of its excess;
        then the limit less a fraction of the bytes below it that the best plan leaves free.

        Args:
          over_nbytes: bytes of the ledger's plan above the budget, packed.
          enough_s: a plan that fits and takes no more seconds is not improved.
        """
        draw = random.Random(self.seed)
        ledger = self.ledger
        limit = self.limit
        best = self._decisions()
        best_peak = ledger.peak_nbytes
        best_cost = over_nbytes(), self._cost()[1]
        while evaluations > 0 and best and best_cost > (0, enough_s):
            for decision in self._neighbourhood(best, draw):
                self._undo(decision)
            fragmentation = draw.choice(self.effort.fragmentations)
            free_nbytes = int(fragmentation * (best_cost[0] or limit - best_peak))
            self.limit = (best_peak if best_cost[0] else limit) - free_nbytes
            evaluations -= self._repair(draw) + self.effort.destroying
            if ledger.peak_nbytes <= limit:
                prune(ledger, self.limit)
            self.limit = limit
            excess, seconds = self._cost()
            is_faster = best_cost[0] or seconds < best_cost[1] * (1 - 1e-9)
            if excess <= 0 and is_faster and (cost := (over_nbytes(), seconds)) <= best_cost:
                best = self._decisions()
                best_peak = ledger.peak_nbytes
                best_cost = cost
            else:
                self._restore(best)

    def reach_limit(self, evaluations: int) -> bool:
        """Search until the limit is kept, or this many gaps were evaluated."""
        draw = random.Random(self.seed)
        best = self._decisions()
        best_cost = self._cost()
        while evaluations > 0 and best_cost[0]:
            crowded = np.flatnonzero(self.ledger.load > self.limit).tolist()
            self._undo_near(draw.choice(crowded), draw)
            early_slots = draw.choice((0, 2))
            evaluations -= self._repair(draw, early_slots) + self.effort.destroying
            cost = self._cost()
            if cost <= best_cost:
                best = self._decisions()
                best_cost = cost
            else:
                self._restore(best)
        return not best_cost[0]

    def _undo_near(self, slot: int, draw: random.Random) -> None:
        """Undo some of the decisions near a slot."""
        undone = []
        for decision in self._decisions():
            distance = abs(_slot(decision) - slot)
            if distance <= self.effort.near_slots and draw.random() < (0.3 if distance else 0.7):
                undone.append(decision)
        for decision in undone:
            self._undo(decision)

    def _cost(self) -> tuple[float, float]:
        """Bytes times slots above the limit, then seconds."""
        excess = float(np.maximum(self.ledger.load - self.limit, 0).sum())
        return excess, plan_seconds(self.ledger, self.scheduler)

    def _repair(self, draw: random.Random, early_slots: int = 0) -> int:
        """Evict again; returns the number of evaluations."""
        deviation = draw.choice(self.effort.noises)
        noise = []
        if deviation:
            noise = [math.exp(draw.gauss(0, deviation)) for _ in self.ledger.tape.nbytes]
        scheduler = self.scheduler if draw.random() < self.effort.with_copies else None
        if scheduler is not None:
            scheduler.refresh()
        eviction = Eviction(
            self.ledger,
            self.limit,
            draw.choice(self.effort.powers),
            scheduler,
            draw.choice(self.effort.idle_prices),
            early_slots > 0 or draw.random() < self.effort.stalling,
            early_slots,
            noise,
            self.effort,
        )
        eviction.run()
        return eviction.evaluations

    def _neighbourhood(self, decisions: list[Decision], draw: random.Random) -> list[Decision]:
        """Decisions to undo: those of a stretch of slots, some of the dearest, or random ones."""
        kind = draw.random()
        if kind < 0.5:
            centre = _slot(draw.choice(decisions))
            width = draw.choice(self.effort.stretches) * self.ledger.tape.count
            return [decision for decision in decisions if abs(_slot(decision) - centre) <= width]
        if kind < 0.8:
            keys = {decision: -self._seconds(decision) * draw.random() for decision in decisions}
            dearest_first = sorted(decisions, key=keys.__getitem__)
            return dearest_first[: draw.randint(1, max(1, len(decisions) // 8))]
        drawn = [decision for decision in decisions if draw.random() < self.effort.share]
        return drawn or [draw.choice(decisions)]

    def _decisions(self) -> list[Decision]:
        return [*self.ledger.recomputations(), *self.ledger.offloads.values()]

    def _restore(self, decisions: Sequence[Decision]) -> None:
        offloads = [decision for decision in decisions if isinstance(decision, Offload)]
        recomputations = [decision for decision in decisions if not isinstance(decision, Offload)]
        self.ledger.restore(recomputations, offloads)

    def _undo(self, decision: Decision) -> None:
        if not isinstance(decision, Offload):
            self.ledger.undo_recompute(*decision)
        elif (decision.value, decision.prefetch) in self.ledger.offloads:
            undo_offload(self.ledger, decision)

    def _seconds(self, decision: Decision) -> float:
        if not isinstance(decision, Offload):
            return self.ledger.tape.operations[decision[0]].seconds or 0.0
        if self.scheduler is None:
            return 0.0
        return self.scheduler.links.stalls_s.get(decision, 0.0)


def _slot(decision: Decision) -> int:
    return decision.prefetch if isinstance(decision, Offload) else decision[1]
