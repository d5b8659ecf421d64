"""What the compiler is handed back for a module: nothing where it fits, else what a plan says; no compiler is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from memplan.compilation.callback import Callback
from memplan.compilation.limits import Limits, Reserve
from memplan.compilation.scheduled import ScheduledModule
from memplan.errors import PlanMismatchError
from memplan.hardware.catalog import local_cpu
from memplan.planning.plan import Plan, name_actions
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.planning.solution import Solution
from memplan.xla.module import read_module
from tests.xla.small_modules import ADD, MIB, chain, module

CPU = local_cpu(2, 8 * 2**30)
TEXT = module(chain(4, "x") + "\nROOT %last = f32[512,1024]{1,0} add(%x3, %x0)", ADD)
PLAIN = ScheduledModule(read_module(TEXT), CPU)
ORDER = runs(range(len(PLAIN.problem.kernels)))


@dataclass
class Fake:
    """Keeps the order that there is, and says what it takes; remembers the budgets that it was asked for."""

    nbytes: int = 0
    name: str = "fake"
    asked: list[int] = field(default_factory=list)

    def plan(self, problem: Problem, budget_nbytes: int, host_nbytes: int = 0, copy_s: object = None) -> Solution:
        self.asked.append(budget_nbytes)
        return Solution(ORDER, self.nbytes, 1.0, 0, 1.0, self.nbytes <= budget_nbytes)


def own(fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
    """Agrees with nobody."""
    return make()


def callback(budget: int, planner: Fake, reserve: Reserve | None = None, follow: Plan | None = None) -> Callback:
    return Callback(CPU, Limits(budget, 0), reserve or Reserve(), None, planner, follow, own)


def test_what_fits_goes_through_as_it_is() -> None:
    planner = Fake()
    asked = callback(PLAIN.device_bytes, planner)
    assert asked(TEXT) is None and not planner.asked
    assert asked.planned.plan is None and asked.planned.fits
    assert asked.planned.predicted_bytes == PLAIN.device_bytes
    assert asked.planned.result is asked.planned.plain


def test_what_is_reserved_is_not_there() -> None:
    planner = Fake()
    assert callback(PLAIN.device_bytes, planner, Reserve(1))(TEXT) is not None
    assert planner.asked == [PLAIN.device_bytes - 1 - PLAIN.resident_bytes]


def test_the_planner_has_what_arguments_and_outputs_leave() -> None:
    planner = Fake()
    asked = callback(7 * MIB, planner)
    text = asked(TEXT)
    assert planner.asked == [7 * MIB - PLAIN.resident_bytes] and PLAIN.resident_bytes == pytest.approx(6 * MIB, abs=99)
    planned = asked.planned
    assert text is not None and read_module(text, planned.base.module).fingerprint
    assert planned.plan is not None and planned.plan.planner == "fake" and planned.schedule == ORDER
    assert planned.predicted_bytes == PLAIN.device_bytes and not planned.fits  # the planner said it would


def test_where_nothing_fits_the_least_is_asked_for() -> None:
    planner = Fake(nbytes=100 * MIB)
    assert callback(7 * MIB, planner)(TEXT) is not None
    assert planner.asked == [7 * MIB - PLAIN.resident_bytes, 0]


def test_a_plan_is_followed_and_nothing_is_planned() -> None:
    planner = Fake()
    plan = Plan(name_actions(PLAIN.problem, ORDER), PLAIN.module.fingerprint, "earlier", "cpu")
    asked = callback(2**40, planner, follow=plan)
    assert asked(TEXT) is not None and not planner.asked
    assert asked.planned.plan is plan


def test_a_plan_for_another_module_is_refused() -> None:
    plan = Plan(name_actions(PLAIN.problem, ORDER), "another", "earlier", "cpu")
    with pytest.raises(PlanMismatchError, match="this step is"):
        callback(7 * MIB, Fake(), follow=plan)(TEXT)
