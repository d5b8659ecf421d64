"""One problem, one family of planners: whoever answers a `Problem` and a budget with a `Solution`; some have names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memplan.errors import MemplanError
from memplan.planning.problem import Problem
from memplan.planning.search import planner
from memplan.planning.solution import Solution
from memplan.planning.timing import CopySeconds


class Planner(Protocol):
    """Whoever makes plans; see `planner.plan` for what is asked of `plan`."""

    @property
    def name(self) -> str: ...

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Solution: ...


@dataclass(frozen=True)
class KernelPlanner:
    """memplan's own: evicts kernel by kernel, see `search.planner`.

    Attributes:
      offloads: what is evicted may be on the host; else it is recomputed.
    """

    name: str
    offloads: bool

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Solution:
        """With less effort for the smallest plan, whatever it takes: it is for an error, and nobody runs it."""
        effort = planner.EFFORT if budget_nbytes > 0 else planner.EFFORT // 10
        if not self.offloads:
            return planner.plan(problem, budget_nbytes, effort=effort)
        return planner.plan(problem, budget_nbytes, host_nbytes, copy_s, effort)


PLANNERS: dict[str, Planner] = {
    one.name: one for one in (KernelPlanner("kernels", offloads=True), KernelPlanner("recompute", offloads=False))
}


def planner_named(wanted: str | Planner | None) -> Planner:
    """A planner by its name; one that is given as it is; None is memplan's own.

    Raises:
      MemplanError: no planner has that name.
    """
    if wanted is None:
        return PLANNERS["kernels"]
    if not isinstance(wanted, str):
        return wanted
    if wanted not in PLANNERS:
        raise MemplanError(f"there is no planner {wanted!r}; there are {', '.join(PLANNERS)}, or pass one of your own.")
    return PLANNERS[wanted]
