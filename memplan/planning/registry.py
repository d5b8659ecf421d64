"""Planners: objects that answer a `Problem` and a budget with a `Solution`."""

from dataclasses import replace
from typing import Protocol

from memplan.errors import MemplanError
from memplan.planning.problem import Problem
from memplan.planning.schedule import CopySeconds, Solution
from memplan.planning.search import planner
from memplan.planning.search.effort import DEFAULT


class Planner(Protocol):
    """An object that makes plans; `search.planner.plan` documents the arguments."""

    @property
    def name(self) -> str: ...

    def plan(
        self,
        problem: Problem,
        budget_nbytes: int,
        host_nbytes: int = 0,
        copy_s: CopySeconds | None = None,
    ) -> Solution: ...


class KernelPlanner:
    """memplan's own planner, which evicts kernel by kernel: `search.planner`."""

    name = "kernels"

    def plan(
        self,
        problem: Problem,
        budget_nbytes: int,
        host_nbytes: int = 0,
        copy_s: CopySeconds | None = None,
    ) -> Solution:
        """A plan; for a budget of 0, which only an error message needs, with less effort."""
        effort = DEFAULT
        if budget_nbytes <= 0:
            effort = replace(DEFAULT, evaluations=DEFAULT.evaluations // 10)
        return planner.plan(problem, budget_nbytes, host_nbytes, copy_s, effort)


OWN = KernelPlanner()


def planner_named(wanted: str | Planner | None) -> Planner:
    """memplan's own planner for None and for its name; any other object itself.

    Raises:
      MemplanError: no planner has that name, or the object does not plan.
    """
    if wanted is None or wanted == OWN.name:
        return OWN
    if isinstance(wanted, str):
        raise MemplanError(
            f"there is no planner {wanted!r}. Omit the argument for memplan's own, "
            f"{OWN.name!r}, or pass an object with a method `plan` of your own."
        )
    if not (hasattr(wanted, "name") and callable(getattr(wanted, "plan", None))):
        raise MemplanError(
            f"{wanted!r:.80} is not a planner, which has a name and a method plan(problem, "
            "budget_nbytes, host_nbytes, copy_s). Omit the argument for memplan's own."
        )
    return wanted
