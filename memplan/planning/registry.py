"""Planners by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memplan.errors import MemplanError
from memplan.planning.problem import Problem
from memplan.planning.search import planner
from memplan.planning.search.planner import Found
from memplan.planning.timing import CopySeconds


class Planner(Protocol):
    """Whoever makes plans; see `planner.plan` for what is asked of `plan`."""

    @property
    def name(self) -> str: ...

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Found: ...


@dataclass(frozen=True)
class Kernels:
    """memplan's own."""

    name: str = "kernels"

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Found:
        return planner.plan(problem, budget_nbytes, host_nbytes, copy_s, _effort(budget_nbytes))


@dataclass(frozen=True)
class Recomputing:
    """The same, with nothing on the host."""

    name: str = "recompute"

    def plan(
        self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: CopySeconds | None = None
    ) -> Found:
        return planner.plan(problem, budget_nbytes, effort=_effort(budget_nbytes))


def _effort(budget_nbytes: int) -> int:
    """Less where the smallest plan is asked for, whatever it takes: nobody runs it."""
    return planner.EFFORT if budget_nbytes > 0 else planner.EFFORT // 10


PLANNERS: dict[str, Planner] = {one.name: one for one in (Kernels(), Recomputing())}


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
