"""What the compiler is handed back in its middle: nothing where the module fits, else a module with a plan, judged."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.compilation import callback as callback_file
from memplan.compilation.callback import Callback
from memplan.compilation.limits import Headroom, Limits
from memplan.errors import PlanMismatchError
from memplan.planning.plan import Plan
from memplan.planning.registry import OWN, Planner
from memplan.planning.schedule import Kind
from memplan.verify.dataflow import NotThePlainModuleError
from memplan.xla.module import Module
from tests.compilation.modules import (
    CPU,
    LEAST,
    NBYTES,
    OTHER,
    TEMPORARIES,
    TEXT,
    WITH_RECOMPUTE,
    InOrder,
    no_agreement,
    scheduled,
)
from tests.hlo import read_module, replaced
from tests.xla.collective_modules import EIGHT
from tests.xla.rewrites.test_merge import changed

PLAIN = scheduled()
WHOLE, RESIDENT = PLAIN.device_bytes, PLAIN.resident_bytes
PLAN = Plan(tuple((Kind.RUN, name) for name in WITH_RECOMPUTE), PLAIN.module.fingerprint, "by hand")


def called_back(
    budget: int, headroom: Headroom = Headroom(), planner: Planner = OWN, follow: Plan | None = None
) -> Callback:
    return Callback(CPU, Limits(budget, 10 * NBYTES), headroom, None, planner, follow, no_agreement)


def test_what_fits_goes_through_untouched() -> None:
    planner = InOrder()
    callback = called_back(WHOLE, planner=planner)
    assert callback(read_module(TEXT)) is None
    assert not planner.calls
    assert callback.planned.result is callback.planned.plain
    assert (callback.planned.plan, callback.planned.fits) == (None, True)
    assert (callback.planned.predicted_bytes, callback.planned.planning_s) == (WHOLE, 0.0)


def test_what_does_not_is_planned_within_the_budget() -> None:
    callback = called_back(RESIDENT + LEAST)
    module = callback(read_module(TEXT))
    assert module is not None
    kernels = [
        op.name for op in module.entry.ops.values() if op.opcode in ("fusion", "custom-call")
    ]
    assert len(kernels) == len(WITH_RECOMPUTE)
    planned = callback.planned
    assert (
        planned.fits and planned.predicted_bytes == RESIDENT + LEAST == planned.result.device_bytes
    )
    assert planned.result is planned.written and planned.plain.device_bytes == WHOLE


def test_a_plan_that_is_too_large_is_handed_back_and_said_not_to_fit() -> None:
    callback = called_back(RESIDENT + LEAST - 1)
    assert callback(read_module(TEXT)) is not None
    assert not callback.planned.fits and callback.planned.predicted_bytes == RESIDENT + LEAST


def test_a_reserve_is_left_free_of_both_memories() -> None:
    assert called_back(WHOLE + 7, Headroom(7))(read_module(TEXT)) is None
    planner = InOrder()
    called_back(WHOLE + 7, Headroom(8, NBYTES), planner)(read_module(TEXT))
    _, budget_nbytes, host_nbytes, _ = planner.calls[0]
    assert (budget_nbytes, host_nbytes) == (TEMPORARIES - 1, 9 * NBYTES)


def test_a_followed_plan_is_carried_out_where_the_module_would_fit_too() -> None:
    planner = InOrder()
    callback = called_back(WHOLE, planner=planner, follow=PLAN)
    assert callback(read_module(TEXT)) is not None
    assert not planner.calls
    assert callback.planned.plan is PLAN and callback.planned.predicted_bytes == RESIDENT + LEAST


def test_a_followed_plan_for_another_module_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="this step is"):
        called_back(WHOLE, follow=PLAN)(read_module(OTHER))
    wrong = replace(PLAN, actions=((Kind.RUN, "nothing"),))
    with pytest.raises(PlanMismatchError, match="nothing"):
        called_back(WHOLE, follow=wrong)(read_module(TEXT))


NOTED = replace(
    PLAN,
    device=CPU.name,
    program="step",
    structure=PLAIN.module.structure,
    kernels=tuple(PLAIN.module.chosen_kernels.items()),
)
ALGORITHM = changed(
    TEXT, ('custom_call_target="grad"', 'custom_call_target="grad", backend_config={"algorithm":7}')
)


def follows(text: str, budget: int, program: str = "step", plan: Plan = NOTED) -> Callback:
    callback = replace(called_back(budget, follow=plan), program=program)
    assert callback(read_module(text)) is not None
    return callback


@pytest.mark.filterwarnings("error")
def test_a_followed_plan_of_the_same_module_is_not_warned_of() -> None:
    assert follows(TEXT, WHOLE).planned.plan is NOTED


def test_another_algorithm_of_the_same_program_is_followed_and_named() -> None:
    with pytest.warns(UserWarning, match=r"grad: grad \w+, now grad \w+\); the plan is used"):
        callback = follows(ALGORITHM, RESIDENT + LEAST)
    assert callback.planned.plan == replace(
        NOTED, fingerprint=scheduled(ALGORITHM).module.fingerprint
    )
    assert callback.planned.predicted_bytes == RESIDENT + LEAST


def test_another_algorithm_with_which_it_no_longer_fits_is_planned_for() -> None:
    with pytest.warns(UserWarning, match="planned again"):
        follows(ALGORITHM, RESIDENT + LEAST - 1)


def test_other_kernels_of_the_same_program_are_planned_for() -> None:
    with pytest.warns(UserWarning, match=r"early: none, now early \w+.*planned again"):
        callback = follows(OTHER, WHOLE, plan=replace(NOTED, kernels=NOTED.kernels[1:]))
    assert callback.planned.plan is not None and callback.planned.plan.planner == "kernels"


@pytest.mark.parametrize(
    ("program", "plan"),
    [("another", NOTED), ("step", replace(NOTED, device="v100")), ("", replace(NOTED, program=""))],
)
def test_a_plan_of_another_program_or_device_is_refused(program: str, plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="this step is"):
        follows(ALGORITHM, WHOLE, program, plan)


def test_a_module_that_computes_something_else_is_not_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(*args: Any) -> Module:
        return replaced(original(*args), "tanh(", "sine(")

    original = callback_file.write
    monkeypatch.setattr(callback_file, "write", write)
    with pytest.raises(NotThePlainModuleError):
        called_back(WHOLE - 1)(read_module(TEXT))


@pytest.mark.parametrize("collects", [True, False])
def test_collection_is_as_it_was_even_after_an_error(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(PlanMismatchError):
            called_back(WHOLE, follow=PLAN)(read_module(OTHER))
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


BUDGET = 1000


def planned_for(
    monkeypatch: pytest.MonkeyPatch, *outcomes: tuple[int, float], orders: int = 1
) -> tuple[list[int], tuple[int, float]]:
    """The limits that a step over a mesh is planned for, and bytes and seconds of the plan that is taken.

    Args:
      outcomes: bytes and seconds of each plan.
      orders: of kernels, each of which takes a second without a budget.
    """
    limits = list[int]()
    remaining = iter(outcomes)

    def write(*_: object) -> SimpleNamespace:
        nbytes, seconds = next(remaining)
        return SimpleNamespace(
            module=SimpleNamespace(replay=SimpleNamespace(step_s=seconds, actions=1)),
            device_bytes=nbytes,
        )

    def plans(plain: object, limit: int, *_: object) -> SimpleNamespace:
        limits.append(limit)
        return SimpleNamespace(agree=lambda _: PLAN)

    for name, fake in (("Plans", plans), ("_pack", lambda *_: None)):
        monkeypatch.setattr(callback_file, name, fake)
    monkeypatch.setattr(Callback, "_write", write)
    orders_to_plan: Any = [
        SimpleNamespace(resident_bytes=0, replay=SimpleNamespace(step_s=1.0, actions=1))
    ] * orders
    callback = replace(called_back(BUDGET), machine=EIGHT)._plan_orders(orders_to_plan, BUDGET)
    return limits, (callback.device_bytes, callback.module.replay.step_s)


LESS = 970  # with room for collectives


def test_where_a_plan_is_slow_the_next_leaves_room_for_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, slow, over = (990, 1.02), (990, 1.2), (1100, 1.0)
    assert planned_for(monkeypatch, fast) == ([BUDGET], fast)
    assert planned_for(monkeypatch, slow, fast) == ([BUDGET, LESS], fast)
    assert planned_for(monkeypatch, slow, (960, 1.3)) == ([BUDGET, LESS], slow)
    assert planned_for(monkeypatch, over) == ([BUDGET], over)


def test_another_order_is_planned_where_the_first_is_slow_or_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, slow, good, over, less = (990, 1.02), (990, 1.2), (990, 1.15), (1100, 1.0), (1090, 2.0)
    both = [BUDGET, LESS]
    assert planned_for(monkeypatch, slow, slow, good, slow, orders=3) == (both * 2, good)
    assert planned_for(monkeypatch, good, slow, fast, orders=3) == ([*both, BUDGET], fast)
    assert planned_for(monkeypatch, slow, good, over, orders=3) == ([*both, BUDGET], good)
    assert planned_for(monkeypatch, over, slow, slow, orders=3) == ([BUDGET, *both], slow)
    assert planned_for(monkeypatch, over, less, orders=2) == ([BUDGET, BUDGET], less)
    assert planned_for(monkeypatch, over, over, fast, orders=3) == ([BUDGET] * 3, fast)
