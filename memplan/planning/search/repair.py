"""Destroy and repair: take a part of a plan back, evict again with another taste, keep what takes less time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.planning.search.evict import Eviction, drop, take_back
from memplan.planning.search.ledger import Copy, Ledger
from memplan.planning.search.links import Offers

_STRETCHES = (0.02, 0.05, 0.1)  # of the slots
_NEAR = 12  # slots
_SHARE = 0.12  # of all repetitions, drawn at large
_WITH_COPIES = 0.8  # of the repairs
_IDLE_PRICES = (0.003, 0.01, 0.03, 0.1)  # of a second of a link that nobody waits for, in seconds
_HOLES = (0.0, 0.1, 0.3, 0.6, 1.0)  # of the bytes above the budget, what the limit is lowered by
_POWERS = (1.0, 1.5)
_WAITING = 0.3  # of the repairs with copies: the kernels may wait for them
_TASTES = (0.0, 0.2, 0.5, 1.0)  # standard deviations of the logarithm

Item = tuple[int, int] | Copy


@dataclass
class Repair:
    """A search around the plan of a ledger, which keeps its limit.

    Attributes:
      offers: copies that could be made; None where nothing is offloaded.
    """

    ledger: Ledger
    limit: int
    offers: Offers | None = None
    seed: int = 0

    def cost(self) -> tuple[float, float]:
        """Bytes times slots above the limit, then seconds."""
        excess = float(np.maximum(self.ledger.load - self.limit, 0).sum())
        if self.offers is None:
            return excess, float(self.ledger.slot_seconds.sum())
        self.offers.refresh()
        return excess, self.offers.links.seconds

    def run(self, over: Callable[[], int], looks: int) -> None:
        """Search until so many chains were looked at: for what fits, then for what takes less time.

        The limit of each repair lies between what the slots take now and the whole, less what the holes of the layout
        add to it.

        Args:
          over: bytes above the budget, packed.
        """
        draw, ledger, whole = random.Random(self.seed), self.ledger, self.limit
        best, near, least = self._items(), ledger.peak_nbytes, (over(), self.cost()[1])
        while looks > 0 and best:
            for item in self._part(best, draw):
                self._drop(item)
            holes = int(draw.choice(_HOLES) * (least[0] or whole - near))
            self.limit = (near if least[0] else whole) - holes
            looks -= self._evict(draw) + 20
            if ledger.peak_nbytes <= whole:
                take_back(ledger, self.limit)
            self.limit = whole
            excess, seconds = self.cost()
            if excess <= 0 and (least[0] or seconds < least[1] * (1 - 1e-9)) and (found := (over(), seconds)) <= least:
                best, near, least = self._items(), ledger.peak_nbytes, found
            else:
                self._become(best)

    def settle(self, looks: int) -> bool:
        """Search until the limit is kept, or so many chains were looked at."""
        draw = random.Random(self.seed)
        best, least = self._items(), self.cost()
        while looks > 0 and least[0]:
            for item in self._crowding(draw):
                self._drop(item)
            looks -= self._evict(draw, early=draw.choice((0, 2))) + 20
            cost = self.cost()
            if cost <= least:
                best, least = self._items(), cost
            else:
                self._become(best)
        return not least[0]

    def _evict(self, draw: random.Random, early: int = 0) -> int:
        """Repair; the effort that it took."""
        noise = draw.choice(_TASTES)
        taste = [math.exp(draw.gauss(0, noise)) for _ in self.ledger.tape.nbytes] if noise else []
        offers = self.offers if draw.random() < _WITH_COPIES else None
        if offers is not None:
            offers.refresh()
        eviction = Eviction(
            self.ledger,
            self.limit,
            taste=taste,
            power=draw.choice(_POWERS),
            offers=offers,
            idle_price=draw.choice(_IDLE_PRICES),
            waits=early > 0 or draw.random() < _WAITING,
            early_at_first=early,
        )
        eviction.run()
        return eviction.looks

    def _crowding(self, draw: random.Random) -> list[Item]:
        """What is near a slot above the limit, some of it."""
        slot = draw.choice(np.flatnonzero(self.ledger.load > self.limit).tolist())
        near = [item for item in self._items() if abs(_slot(item) - slot) <= _NEAR]
        return [item for item in near if draw.random() < (0.7 if _slot(item) == slot else 0.3)]

    def _items(self) -> list[Item]:
        return [*self.ledger.pairs(), *self.ledger.copies.values()]

    def _become(self, items: Sequence[Item]) -> None:
        copies = [item for item in items if isinstance(item, Copy)]
        self.ledger.become((item for item in items if not isinstance(item, Copy)), copies)

    def _drop(self, item: Item) -> None:
        if not isinstance(item, Copy):
            self.ledger.remove(*item)
        elif (item.value, item.back) in self.ledger.copies:
            drop(self.ledger, item)

    def _part(self, items: list[Item], draw: random.Random) -> list[Item]:
        """What to take back: of a stretch of slots, some of the dearest, or any."""
        way = draw.random()
        if way < 0.5:
            centre, width = _slot(draw.choice(items)), draw.choice(_STRETCHES) * self.ledger.tape.count
            return [item for item in items if abs(_slot(item) - centre) <= width]
        if way < 0.8:
            dear = sorted(items, key=lambda item: -self._seconds(item) * draw.random())
            return dear[: draw.randint(1, max(1, len(dear) // 8))]
        return [item for item in items if draw.random() < _SHARE] or [draw.choice(items)]

    def _seconds(self, item: Item) -> float:
        if isinstance(item, Copy):
            return 0.0 if self.offers is None else self.offers.busy_s(item.value)
        return self.ledger.tape.seconds[item[0]] or 0.0


def _slot(item: Item) -> int:
    return item.back if isinstance(item, Copy) else item[1]
