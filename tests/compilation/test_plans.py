"""Plans for a module: found on disk or made, with extra outputs or without, and the same smallest for every budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memplan.compilation import scheduled as scheduled_file
from memplan.compilation.scheduled import Plans, ScheduledModule
from memplan.hardware.roofline import copy_seconds
from memplan.planning.plan import Plan
from memplan.planning.problem import Problem
from memplan.planning.registry import OWN, Planner
from memplan.planning.schedule import Kind
from tests.compilation.modules import CPU, LEAST, NBYTES, V100, WITH_RECOMPUTE, InOrder, scheduled
from tests.hlo import read_module
from tests.xla.rewrites.test_extra_outputs import TEXT as BESIDE
from tests.xla.rewrites.test_merge import ROOMY

PLAIN = scheduled()


def within(budget_bytes: int, planner: Planner = OWN, plain: ScheduledModule = PLAIN) -> Plans:
    return Plans(plain, budget_bytes, 0, planner)


def test_a_plan_is_for_the_room_that_residents_leave() -> None:
    plan = within(PLAIN.resident_bytes + LEAST).make()
    assert (plan.rewritten_for_nbytes, plan.fingerprint) == (LEAST, PLAIN.module.fingerprint)
    assert (plan.planner, plan.device) == ("kernels", "cpu")
    assert plan.actions == tuple((Kind.RUN, name) for name in WITH_RECOMPUTE)


def test_the_smallest_is_the_same_for_every_budget() -> None:
    plans = [
        within(PLAIN.resident_bytes + nbytes).make()
        for nbytes in (LEAST - 1, LEAST // 2, 0, -PLAIN.resident_bytes)
    ]
    assert (
        len({replace(plan, budget_bytes=None) for plan in plans}) == 1
        and plans[0].rewritten_for_nbytes == 0
    )


def test_copies_are_offered_a_quarter_slower_where_the_host_has_room() -> None:
    planner = InOrder()
    for host_bytes in (0, 5):
        Plans(PLAIN, PLAIN.device_bytes, host_bytes, planner).make()
    (*_, no_room, without), (*_, room, with_host) = planner.calls
    assert (no_room, without, room) == (0, None, 5)
    assert with_host is not None and with_host(NBYTES) == 1.25 * copy_seconds(NBYTES, CPU)


def test_no_problem_is_planned_twice_for_a_budget() -> None:
    planner = InOrder()
    within(PLAIN.resident_bytes, planner).make()  # no bytes are left: nothing but the smallest
    assert [budget for _, budget, *_ in planner.calls] == [0]


def has_extra(problem: Problem) -> bool:
    return any(".again" in kernel.name for kernel in problem.kernels)


@pytest.mark.parametrize(
    ("share", "tries", "chosen"),
    [(1.05, 1, True), (1.5, 2, True), (3.0, 2, False)],
    ids=["little more than the step as it is", "faster than without", "slower than without"],
)
def test_extra_outputs_come_first_and_go_where_they_cost_more(
    monkeypatch: pytest.MonkeyPatch, share: float, tries: int, chosen: bool
) -> None:
    monkeypatch.setattr(scheduled_file, "output_costs", lambda *_: {"masked": 0.5})
    monkeypatch.setattr(scheduled_file, "recomputed_kernels", lambda problem, _: {0})
    plain = ScheduledModule(read_module(BESIDE), V100)
    planner = InOrder(
        seconds=lambda problem: (share if has_extra(problem) else 2.0) * plain.replay.step_s
    )
    plan = within(ROOMY, planner, plain).make()
    assert [has_extra(problem) for problem, *_ in planner.calls] == [True, False][:tries]
    assert plan.extra_outputs == (("masked",) if chosen else ())


def test_values_that_no_plan_recomputes_are_no_extra_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prices: list[float] = []

    def recomputed(problem: Problem, _: int) -> set[int]:
        prices.append(problem.kernels[0].seconds)
        return set()

    monkeypatch.setattr(scheduled_file, "output_costs", lambda *_: {"masked": 0.5})
    monkeypatch.setattr(scheduled_file, "recomputed_kernels", recomputed)
    planner, plain = InOrder(), ScheduledModule(read_module(BESIDE), V100)
    assert within(ROOMY, planner, plain).make().extra_outputs == ()
    assert len(planner.calls) == 1
    assert prices == [
        plain.rewrite(ROOMY - plain.resident_bytes, whole=True).timed_problem.kernels[0].seconds / 2
    ]


def test_all_processes_follow_what_was_agreed_on() -> None:
    fingerprints: list[str] = []
    agreed = Plan((), "f00d", "kernels")

    def agree(fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
        fingerprints.append(fingerprint)
        return agreed

    planner = InOrder()
    assert within(PLAIN.device_bytes - 1, planner).agree(agree) is agreed
    assert fingerprints == [PLAIN.module.fingerprint] and not planner.calls
