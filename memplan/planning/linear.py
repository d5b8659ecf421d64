"""A mixed-integer linear program, written row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import highspy
import numpy as np


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

    def solve(self, seconds: float, gap: float, start: np.ndarray | None = None) -> Solution:
        """The best solution within `gap` (a share) of the least, or the best after `seconds`.

        `start` holds values of all variables, of which those of the choices are tried first.
        """
        if not self.costs:
            return Solution(np.zeros(0), 0.0)
        solver = highspy.Highs()
        for option, value in (("output_flag", False), ("time_limit", seconds), ("mip_rel_gap", gap), ("threads", 1)):
            solver.setOptionValue(option, value)
        solver.passModel(self._model())
        if start is not None:
            choices = np.flatnonzero(self.whole)
            solver.setSolution(len(choices), choices, np.round(start[choices]).astype(np.float64))
        solver.run()
        info = solver.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        return Solution(values, info.mip_dual_bound)

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self._bounds)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.zeros(len(self.costs)), np.array(self.above)
        model.row_lower_ = np.array(self._bounds, dtype=float)
        model.row_upper_ = np.full(len(self._bounds), highspy.kHighsInf)
        kinds = {True: highspy.HighsVarType.kInteger, False: highspy.HighsVarType.kContinuous}
        model.integrality_ = [kinds[whole] for whole in self.whole]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.num_col_, model.a_matrix_.num_row_ = model.num_col_, model.num_row_
        model.a_matrix_.start_ = np.searchsorted(self._rows, np.arange(len(self._bounds) + 1))
        model.a_matrix_.index_ = np.array(self._columns)
        model.a_matrix_.value_ = np.array(self._factors, dtype=float)
        return model
