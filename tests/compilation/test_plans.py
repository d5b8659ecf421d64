"""Where a plan comes from: processes agree, memplan's own are kept on disk, a planner of the user's is asked anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.compilation.plans import Plans
from memplan.planning.plan import Plan
from memplan.planning.registry import PLANNERS
from tests.compilation.test_callback import PLAIN, Fake, own
from tests.xla.small_modules import MIB

BUDGET = 7 * MIB


def plans(planner: Fake, budget: int = BUDGET) -> Plans:
    return Plans(PLAIN, budget, 0, planner)


def test_processes_agree_by_the_module_and_by_all_else() -> None:
    asked: list[tuple[str, str]] = []

    def agree(fingerprint: str, key: str, make: Callable[[], Plan]) -> Plan:
        asked.append((fingerprint, key))
        return make()

    for budget in (BUDGET, BUDGET, BUDGET + 1):
        assert plans(Fake(), budget).agree(agree).fingerprint == PLAIN.module.fingerprint
    assert {fingerprint for fingerprint, _ in asked} == {PLAIN.module.fingerprint}
    assert asked[0] == asked[1] != asked[2]


def test_the_plan_of_another_process_is_taken_as_it_is() -> None:
    theirs = Plan((), PLAIN.module.fingerprint, "theirs")
    planner = Fake()
    assert plans(planner).agree(lambda *_: theirs) is theirs and not planner.asked


def test_a_planner_of_the_users_is_asked_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path))
    planner = Fake(name="kernels")  # another's code under a name of memplan's
    for _ in range(2):
        plans(planner).agree(own)
    assert len(planner.asked) == 2 and not list(tmp_path.iterdir())


def test_a_plan_of_memplans_own_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path))
    planner = Fake(name="fake")
    monkeypatch.setitem(PLANNERS, "fake", planner)
    first, second = (plans(planner).agree(own) for _ in range(2))
    assert first == second and len(planner.asked) == 1


def test_the_smallest_plan_is_the_same_for_every_budget() -> None:
    planner = Fake(nbytes=100 * MIB)
    made = {plans(planner, budget).make() for budget in (7 * MIB - 1, 7 * MIB)}
    assert len(made) == 1 and planner.asked.count(0) == 2


def test_an_offload_has_a_price_where_there_is_a_host_to_copy_to() -> None:
    prices: list[object] = []

    class Priced(Fake):
        def plan(self, problem, budget_nbytes, host_nbytes=0, copy_s=None):  # type: ignore[no-untyped-def]
            prices.append(copy_s and copy_s(MIB) > 0)
            return super().plan(problem, budget_nbytes)

    for host_bytes in (0, MIB):
        Plans(PLAIN, BUDGET, host_bytes, Priced()).make()
    assert prices == [None, True]
