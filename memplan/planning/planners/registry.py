"""The planners by name."""

from __future__ import annotations

from memplan.errors import MemplanError
from memplan.planning.planners.greedy import GreedyPlanner
from memplan.planning.planners.milp import MilpPlanner
from memplan.planning.planners.protocol import Planner

_GREEDY, _MILP = GreedyPlanner(), MilpPlanner()

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in (_GREEDY, _MILP)}
DEFAULT = _MILP.name


def planner_named(name: str | None) -> Planner:
    """The planner with this name; None is the default one."""
    found = PLANNERS.get(name or DEFAULT)
    if found is None:
        raise MemplanError(f"there is no planner {name!r}. Choose one of: {', '.join(PLANNERS)}.")
    return found
