"""Destroy and repair: take a part of a plan back, evict again with another taste, keep what takes less time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from memplan.planning.evict import Eviction, take_back
from memplan.planning.ledger import Ledger

_STRETCHES = (0.02, 0.05, 0.1)  # of the slots
_SHARE = 0.12  # of all repetitions, drawn at large
_TASTES = (0.0, 0.2, 0.5, 1.0)  # standard deviations of the logarithm


@dataclass
class Repair:
    """A search around the plan of a ledger, which keeps its limit.

    Attributes:
      accept: is a plan that is faster one to go on from?
    """

    ledger: Ledger
    limit: int
    accept: Callable[[Ledger], bool]
    seed: int = 0

    def run(self, looks: int) -> int:
        """Search until so many chains were looked at; how often something faster was found."""
        draw, ledger, gained = random.Random(self.seed), self.ledger, 0
        best, least = ledger.pairs(), ledger.seconds
        while looks > 0 and best:
            taken = self._part(best, draw)
            for op, slot in taken:
                ledger.remove(op, slot)
            noise = draw.choice(_TASTES)
            taste = [math.exp(draw.gauss(0, noise)) for _ in ledger.tape.nbytes] if noise else []
            eviction = Eviction(ledger, self.limit, taste=taste)
            done = eviction.run()
            looks -= eviction.looks + 20
            if done:
                take_back(ledger, self.limit)
            if done and ledger.seconds < least * (1 - 1e-9) and self.accept(ledger):
                best, least, gained = ledger.pairs(), ledger.seconds, gained + 1
            else:
                ledger.become(best, ledger.copies.values())
        return gained

    def _part(self, pairs: list[tuple[int, int]], draw: random.Random) -> list[tuple[int, int]]:
        """Repetitions to take back: of a stretch of slots, some of the dearest, or any."""
        way = draw.random()
        if way < 0.5:
            centre, width = draw.choice(pairs)[1], draw.choice(_STRETCHES) * self.ledger.tape.count
            return [pair for pair in pairs if abs(pair[1] - centre) <= width]
        if way < 0.8:
            seconds = self.ledger.tape.seconds
            dear = sorted(pairs, key=lambda pair: -(seconds[pair[0]] or 0.0) * draw.random())
            return dear[: draw.randint(1, max(1, len(dear) // 8))]
        return [pair for pair in pairs if draw.random() < _SHARE] or [draw.choice(pairs)]
