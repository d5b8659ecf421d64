"""A step planned for many budgets, compiled for a described GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan import api
from memplan.report.curve import MEMPLAN, XLA, Curve

WIDTH, ROWS = 256, 4096


def step(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss(weights: Any) -> jax.Array:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return (y * y).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


@pytest.fixture(scope="module")
def curve() -> Curve:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return api.curve(step, (weights, x), points=3, device="v100", donate_argnums=0)


@pytest.mark.gpu_aot
def test_every_budget_has_a_point_of_memplan_and_of_xla(curve: Curve) -> None:
    for way in (MEMPLAN, XLA):
        budgets = [point.budget_bytes for point in curve.points if point.way == way]
        assert len(budgets) == 3
        assert budgets == sorted(budgets, key=lambda budget: -(budget or 0))
        assert all(curve.floor_bytes <= (budget or 0) < curve.plain_bytes for budget in budgets)


@pytest.mark.gpu_aot
def test_points_are_inside_their_budgets_and_more_memory_is_never_slower(curve: Curve) -> None:
    for way in (MEMPLAN, XLA):
        found = [point for point in curve.points if point.way == way and point.device_bytes is not None]
        assert all((point.device_bytes or 0) <= (point.budget_bytes or 0) for point in found)
        steps = [point.step_s or 0.0 for point in found]
        assert steps == sorted(steps)
    assert any(point.way == MEMPLAN and point.device_bytes is not None for point in curve.points)


@pytest.mark.gpu_aot
def test_ways_without_a_budget_come_first(curve: Curve) -> None:
    names = [point.way for point in curve.points if point.budget_bytes is None]
    assert names[0] == "plain jax" and "jax.checkpoint, nothing saved" in names
    assert [point.way for point in curve.points[: len(names)]] == names
    assert curve.points[0].device_bytes == curve.plain_bytes
