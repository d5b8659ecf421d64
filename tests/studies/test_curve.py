"""A step planned for many budgets, compiled for a described GPU."""

import pytest

from memplan import api
from memplan.errors import BudgetError
from memplan.report.curve import BOUND, MEMPLAN, XLA, Curve
from tests.dense import step
from tests.xla.steps import array

WIDTH, ROWS = 256, 4096
SMALL = [array(8, 8)], array(64, 8)

pytestmark = [pytest.mark.slow, pytest.mark.gpu_aot]


@pytest.fixture(scope="module")
def curve() -> Curve:
    args = [array(WIDTH, WIDTH)] * 8, array(ROWS, WIDTH)
    return api.curve(step, args, points=3, device="v100", donate_argnums=0)


def test_every_budget_has_a_point_of_memplan_and_of_xla(curve: Curve) -> None:
    for method in (MEMPLAN, XLA):
        budgets = [point.budget_bytes for point in curve.points if point.way == method]
        assert len(budgets) == 3
        assert budgets == sorted(budgets, key=lambda budget: -(budget or 0))
        assert all(curve.floor_bytes <= (budget or 0) < curve.plain_bytes for budget in budgets)


def test_points_are_inside_their_budgets_and_more_memory_is_never_slower(curve: Curve) -> None:
    for method in (MEMPLAN, XLA):
        points = [
            point
            for point in curve.points
            if point.way == method and point.device_bytes is not None
        ]
        assert all((point.device_bytes or 0) <= (point.budget_bytes or 0) for point in points)
        steps = [point.step_s or 0.0 for point in points]
        assert steps == sorted(steps)
    assert any(point.way == MEMPLAN and point.device_bytes is not None for point in curve.points)


def test_no_point_is_below_the_lower_bound(curve: Curve) -> None:
    bounds = {
        point.budget_bytes: point.step_s or 0.0 for point in curve.points if point.way == BOUND
    }
    assert len(bounds) == 3 and all(bounds.values())
    for point in curve.points:
        for budget, bound_s in bounds.items():
            if point.step_s is not None and (point.device_bytes or 0) <= (budget or 0):
                assert point.step_s >= bound_s


def test_methods_without_a_budget_come_first(curve: Curve) -> None:
    names = [point.way for point in curve.points if point.budget_bytes is None]
    assert names[0] == "plain jax" and "jax.checkpoint, nothing saved" in names
    assert [point.way for point in curve.points[: len(names)]] == names
    assert curve.points[0].device_bytes == curve.plain_bytes


def test_budgets_may_be_shares_of_the_plain_peak() -> None:
    curve = api.curve(step, SMALL, points=(0.5, 0.9), device="v100")
    budgets = [point.budget_bytes for point in curve.points if point.way == MEMPLAN]
    assert budgets == [int(0.9 * curve.plain_bytes), int(0.5 * curve.plain_bytes)]


@pytest.mark.parametrize("shares", [(), (0.0,), (0.5, 1.5), (-0.1,)])
def test_invalid_shares_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(BudgetError, match="above 0 and at most 1"):
        api.curve(step, SMALL, points=shares, device="v100")
