"""A mixed-integer linear program, written row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    Attributes:
      values: one per variable; None where it found nothing in time.
      cost: of these values.
      bound: no solution costs less.
    """

    values: np.ndarray | None
    cost: float
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

    def at_least(self, bound: float, terms: Iterable[tuple[int, float]]) -> int:
        """sum(variable * factor) >= bound; returns the number of the row."""
        row = len(self._bounds)
        for variable, factor in terms:
            self._rows.append(row)
            self._columns.append(variable)
            self._factors.append(factor)
        self._bounds.append(bound)
        return row

    def implies(self, variable: int, others: Iterable[int]) -> None:
        """Where `variable` is 1, one of `others` is."""
        self.at_least(0, [(variable, -1), *((other, 1) for other in others)])

    def ready(self) -> Solver:
        """The program as it is now, for the solver."""
        return Solver(self._model())

    def solve(self, seconds: float, gap: float) -> Solution:
        """See `Solver.solve`."""
        return self.ready().solve(seconds, gap)

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


class Solver:
    """A program written once, to be solved again and again under other bounds."""

    def __init__(self, model: highspy.HighsLp):
        self._model = model
        self._kinds = list(model.integrality_)
        self._choices = np.flatnonzero(np.array(self._kinds) == highspy.HighsVarType.kInteger)
        self._above = np.array(model.col_upper_)
        self._bounds = np.array(model.row_lower_)

    def require(self, rows: Sequence[int], bounds: Sequence[float]) -> None:
        """Other lower bounds for some rows."""
        self._bounds[list(rows)] = bounds

    def relax(self) -> Solution:
        """The least where choices may be shares: no solution costs less."""
        return self._run({"solver": "simplex"}, np.zeros(len(self._above)), self._above, None, whole=False)

    def solve(
        self, seconds: float, gap: float, start: np.ndarray | None = None, free: np.ndarray | None = None
    ) -> Solution:
        """The best solution within `gap` (a share) of the least, or the best after `seconds`.

        `start` holds values of all variables, of which those of the choices are tried first. Choices that are not
        `free` (one flag per variable) keep their value of `start`.
        """
        below, above = np.zeros(len(self._above)), self._above.copy()
        if start is not None and free is not None:
            fixed = self._choices[~free[self._choices]]
            below[fixed] = above[fixed] = np.round(start[fixed])
        return self._run({"time_limit": seconds, "mip_rel_gap": gap}, below, above, start, whole=True)

    def _run(
        self, options: dict[str, Any], below: np.ndarray, above: np.ndarray, start: np.ndarray | None, whole: bool
    ) -> Solution:
        if not len(above):
            return Solution(np.zeros(0), 0.0, 0.0)
        solver = highspy.Highs()
        for option, value in {"output_flag": False, "threads": 1, **options}.items():
            solver.setOptionValue(option, value)
        self._model.col_lower_, self._model.col_upper_, self._model.row_lower_ = below, above, self._bounds
        self._model.integrality_ = self._kinds if whole else []
        solver.passModel(self._model)
        if start is not None:
            solver.setSolution(len(self._choices), self._choices, np.round(start[self._choices]).astype(np.float64))
        solver.run()
        info = solver.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        return Solution(
            values, info.objective_function_value, info.mip_dual_bound if whole else info.objective_function_value
        )
