"""What bytes above a limit weigh: the measure that eviction lowers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Excess:
    """Bytes above a limit times slots, as a share of the limit."""

    limit: int
    power: float = 1.0  # of the share in each slot: 1 weighs all slots alike, more the fullest most

    def of(self, load: np.ndarray) -> float:
        """The excess of all slots, whose live bytes are `load`."""
        if self.power == 1:
            return (int(np.maximum(load, self.limit).sum()) - self.limit * len(load)) / self.limit
        return float((((np.maximum(load, self.limit) - self.limit) / self.limit) ** self.power).sum())

    def of_one(self, nbytes: int) -> float:
        """Of one slot."""
        return (max(0, nbytes - self.limit) / self.limit) ** self.power

    def of_a_byte(self, load: np.ndarray) -> list[float]:
        """Per slot, what one byte less in each of those before would take off, but for the limit's share."""
        over = np.maximum(load - self.limit, 0) / self.limit
        weights = over > 0 if self.power == 1 else self.power * over ** (self.power - 1)
        return np.concatenate([[0.0], np.cumsum(weights)]).tolist()
