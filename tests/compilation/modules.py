"""A scheduled module in which a value waits long for its last reader, and a planner with preset answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memplan.compilation.scheduled import ScheduledModule
from memplan.hardware import catalog
from memplan.planning.packing import pack
from memplan.planning.plan import Plan
from memplan.planning.problem import Problem
from memplan.planning.schedule import CopySeconds, Solution, runs
from tests.hlo import read_module
from tests.xla.rewrites.test_merge import (
    ARRAY,
    BENT,
    ENTRY,
    FUSED,
    MASKED,
    NBYTES,
    changed,
    library,
    returned,
)

CPU, V100 = catalog.local_cpu(2, 2**33), catalog.named("v100")
GRAD = f'  %grad = {ARRAY} custom-call(%mid, %bent), custom_call_target="grad"\n'
LATE = f'  %late = {ARRAY} custom-call(%grad, %masked), custom_call_target="late"\n'
NEXT = f'  %next = {ARRAY} custom-call(%early, %bent), custom_call_target="next"\n'
OPS = [
    MASKED,
    library("early", "masked"),
    BENT.replace("%x", "%z"),
    NEXT,
    library("mid", "next"),
    GRAD,
    LATE,
]
TEXT = FUSED + ENTRY + "".join(OPS) + returned("late")
OTHER = changed(TEXT, ("custom-call(%next)", "custom-call(%early)"))
TEMPORARIES = 3 * NBYTES  # masked, bent, next and mid at once, one of them where the output will be
LEAST = 2 * NBYTES  # with masked recomputed for its last reader
WITH_RECOMPUTE = ("masked", "early", "bent", "next", "mid", "grad", "masked", "late")


def scheduled(text: str = TEXT) -> ScheduledModule:
    return ScheduledModule(read_module(text), CPU)


def no_agreement(fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
    """The agreement of a single process."""
    return make()


@dataclass(frozen=True)
class InOrder:
    """A planner that keeps the order, records its calls, and gives solutions the seconds that `seconds` computes."""

    name: str = "in order"
    seconds: Callable[[Problem], float] = lambda problem: 1.0
    calls: list[tuple[Problem, int, int, CopySeconds | None]] = field(default_factory=list)

    def plan(
        self,
        problem: Problem,
        budget_nbytes: int,
        host_nbytes: int = 0,
        copy_s: CopySeconds | None = None,
    ) -> Solution:
        self.calls.append((problem, budget_nbytes, host_nbytes, copy_s))
        schedule = runs(range(len(problem.kernels)))
        nbytes = pack(problem, schedule).nbytes
        return Solution(schedule, nbytes, self.seconds(problem), 0, 0.0, nbytes <= budget_nbytes)
