"""A mixed-integer linear program, written row by row and solved by HiGHS (through SciPy)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    Attributes:
      values: one per variable; None where it found nothing in time.
      bound: no solution costs less.
    """

    values: np.ndarray | None
    bound: float


@dataclass
class LinearProgram:
    """Variables between 0 and 1 (or above), whose weighted sum is to be least, and rows that bound sums from below."""

    costs: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    above: list[float] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)
    _bounds: list[float] = field(default_factory=list)

    def choice(self, cost: float = 0.0) -> int:
        """A variable that is 0 or 1."""
        return self._add(cost, True, 1.0)

    def share(self, cost: float = 0.0) -> int:
        """A variable from 0 to 1 that follows the choices by itself."""
        return self._add(cost, False, 1.0)

    def excess(self, cost: float) -> int:
        """A variable of 0 or more."""
        return self._add(cost, False, np.inf)

    def _add(self, cost: float, whole: bool, above: float) -> int:
        self.costs.append(cost)
        self.whole.append(whole)
        self.above.append(above)
        return len(self.costs) - 1

    def at_least(self, bound: float, terms: Iterable[tuple[int, float]]) -> None:
        """sum(variable * factor) >= bound."""
        for variable, factor in terms:
            self._rows.append(len(self._bounds))
            self._columns.append(variable)
            self._factors.append(factor)
        self._bounds.append(bound)

    def implies(self, variable: int, others: Iterable[int]) -> None:
        """Where `variable` is 1, one of `others` is."""
        self.at_least(0, [(variable, -1), *((other, 1) for other in others)])

    def solve(self, seconds: float, gap: float) -> Solution:
        """The best solution within `gap` (a share) of the least, or the best after `seconds`."""
        if not self.costs:
            return Solution(np.zeros(0), 0.0)
        shape = len(self._bounds), len(self.costs)
        rows = csr_matrix((self._factors, (self._rows, self._columns)), shape=shape)
        above: Any = np.array(self.above)  # SciPy's stubs know single numbers only
        below: Any = np.array(self._bounds)
        found = milp(
            np.array(self.costs),
            integrality=np.array(self.whole, dtype=int),
            bounds=Bounds(0, above),
            constraints=LinearConstraint(rows, below, np.inf),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        bound = found.mip_dual_bound
        return Solution(found.x, 0.0 if bound is None else float(bound))
