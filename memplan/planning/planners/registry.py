"""The planners by name."""

from __future__ import annotations

from memplan.errors import MemplanError
from memplan.planning.planners.greedy import GreedyPlanner
from memplan.planning.planners.milp import MilpPlanner
from memplan.planning.planners.protocol import Planner

_GREEDY, _MILP = GreedyPlanner(), MilpPlanner()

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in (_GREEDY, _MILP)}
DEFAULT = _MILP.name


def planner_named(asked: str | Planner | None) -> Planner:
    """The planner with this name, or the one that is given itself; None is the default one."""
    if not isinstance(asked, (str, type(None))):
        return _checked(asked)
    found = PLANNERS.get(asked or DEFAULT)
    if found is None:
        raise MemplanError(f"there is no planner {asked!r}. Choose one of: {', '.join(PLANNERS)}.")
    return found


def _checked(planner: Planner) -> Planner:
    if isinstance(planner, type) or not hasattr(planner, "propose") or not isinstance(planner.name, str):
        raise MemplanError(
            f"{planner!r} is no planner. One has a name, a str, and a method propose(problem) that returns a Proposal; "
            "of a class, pass an instance."
        )
    return planner
