"""Large-neighbourhood search (Shaw, CP 1998): destroy a part of a plan, repair it by eviction, keep improvements.

A neighbourhood is a stretch of slots, the dearest decisions, or random ones; repairs differ by noise, by the weight of
the fullest slots, and by the price of an idle link, all drawn at random each time.
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

    def improve(self, over_nbytes: Callable[[], int], evaluations: int) -> None:
        """Search until this many gaps were evaluated: first for a plan that fits, then for a faster one.

        Until a plan fits, a repair's limit is the best plan's peak less a fraction of its excess; then the whole limit
        less a fraction of what that plan leaves of it.

        Args:
          over_nbytes: bytes of the ledger's plan above the budget, packed.
        """
        draw, ledger, whole = random.Random(self.seed), self.ledger, self.limit
        best, near, least = self._decisions(), ledger.peak_nbytes, (over_nbytes(), self._cost()[1])
        while evaluations > 0 and best:
            for decision in self._neighbourhood(best, draw):
                self._undo(decision)
            holes = int(draw.choice(self.effort.fragmentations) * (least[0] or whole - near))
            self.limit = (near if least[0] else whole) - holes
            evaluations -= self._repair(draw) + self.effort.destroying
            if ledger.peak_nbytes <= whole:
                prune(ledger, self.limit)
            self.limit = whole
            excess, seconds = self._cost()
            faster = least[0] or seconds < least[1] * (1 - 1e-9)
            if excess <= 0 and faster and (found := (over_nbytes(), seconds)) <= least:
                best, near, least = self._decisions(), ledger.peak_nbytes, found
            else:
                self._restore(best)

    def reach_limit(self, evaluations: int) -> bool:
        """Search until the limit is kept, or this many gaps were evaluated."""
        draw = random.Random(self.seed)
        best, least = self._decisions(), self._cost()
        while evaluations > 0 and least[0]:
            # destroy some of the decisions near a slot above the limit
            slot = draw.choice(np.flatnonzero(self.ledger.load > self.limit).tolist())
            near = [one for one in self._decisions() if abs(_slot(one) - slot) <= self.effort.near_slots]
            for decision in [one for one in near if draw.random() < (0.7 if _slot(one) == slot else 0.3)]:
                self._undo(decision)
            evaluations -= self._repair(draw, early_slots=draw.choice((0, 2))) + self.effort.destroying
            cost = self._cost()
            if cost <= least:
                best, least = self._decisions(), cost
            else:
                self._restore(best)
        return not least[0]

    def _cost(self) -> tuple[float, float]:
        """Bytes times slots above the limit, then seconds."""
        excess = float(np.maximum(self.ledger.load - self.limit, 0).sum())
        return excess, plan_seconds(self.ledger, self.scheduler)

    def _repair(self, draw: random.Random, early_slots: int = 0) -> int:
        """Evict again; returns the number of evaluations."""
        deviation = draw.choice(self.effort.noises)
        noise = [math.exp(draw.gauss(0, deviation)) for _ in self.ledger.tape.nbytes] if deviation else []
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
            centre, width = _slot(draw.choice(decisions)), draw.choice(self.effort.stretches) * self.ledger.tape.count
            return [one for one in decisions if abs(_slot(one) - centre) <= width]
        if kind < 0.8:
            dear = sorted(decisions, key=lambda one: -self._seconds(one) * draw.random())
            return dear[: draw.randint(1, max(1, len(dear) // 8))]
        return [one for one in decisions if draw.random() < self.effort.share] or [draw.choice(decisions)]

    def _decisions(self) -> list[Decision]:
        return [*self.ledger.recomputations(), *self.ledger.offloads.values()]

    def _restore(self, decisions: Sequence[Decision]) -> None:
        offloads = [one for one in decisions if isinstance(one, Offload)]
        self.ledger.restore((one for one in decisions if not isinstance(one, Offload)), offloads)

    def _undo(self, decision: Decision) -> None:
        if not isinstance(decision, Offload):
            self.ledger.undo_recompute(*decision)
        elif (decision.value, decision.prefetch) in self.ledger.offloads:
            undo_offload(self.ledger, decision)

    def _seconds(self, decision: Decision) -> float:
        if isinstance(decision, Offload):
            return 0.0 if self.scheduler is None else self.scheduler.links.waited_for.get(decision, 0.0)
        return self.ledger.tape.operations[decision[0]].seconds or 0.0


def _slot(decision: Decision) -> int:
    return decision.prefetch if isinstance(decision, Offload) else decision[1]
