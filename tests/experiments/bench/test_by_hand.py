"""Programs drawn from boundaries, and the law on plans beside `jax.checkpoint` by hand."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from experiments.bench import boundaries, views
from experiments.bench.boundaries import LAYERS, ON_MESHES, ON_ONE_DEVICE, Program, Size, recipe_of
from experiments.bench.cases import BY_HAND, Case
from experiments.bench.measures import by_hand
from tests.cases.within_share import QUICK

SMALL = Size((64, 16, 32), (64, 2, 4))


def mesh_of_one() -> Mesh:
    return jax.make_mesh((1, 1), ("host", "device"), axis_types=(AxisType.Auto,) * 2)


def program(number: int, meshed: bool = False) -> Program:
    return Program(recipe_of(number, meshed), SMALL, mesh_of_one() if meshed else None)


# The grammar.


def test_every_boundary_has_its_turn() -> None:
    recipes = [recipe_of(number) for number in range(len(ON_ONE_DEVICE) + 1)]
    assert {boundary for recipe in recipes for boundary in recipe.boundaries} == {*ON_ONE_DEVICE}
    assert not recipes[0].boundaries
    for number in range(len(ON_MESHES)):
        divided = [b for b in recipe_of(number, meshed=True).boundaries if b in ON_MESHES]
        assert len(divided) == 1
    meshed = [recipe_of(number, meshed=True) for number in range(len(ON_MESHES))]
    assert {b for recipe in meshed for b in recipe.boundaries} >= {*ON_MESHES}


def test_cases_have_every_layer_trait_and_depth() -> None:
    recipes = [case.facts["recipe"] for case in BY_HAND.values()]
    assert {recipe.layer for recipe in recipes} == {*LAYERS}
    assert {len(recipe.boundaries) for recipe in recipes} == {0, 1, 2, 3}
    for trait in ("pullbacks", "second_order", "skips", "columns", "updates", "donated"):
        assert len({getattr(recipe, trait) for recipe in recipes}) == 2
    assert all(recipe.updates for recipe in recipes if recipe.donated)


def test_a_number_is_one_program() -> None:
    assert recipe_of(26) == recipe_of(26) != recipe_of(27)
    assert str(recipe_of(26)) == (
        "custom_jvp of net, switch of layer, cond of layer, two pullbacks"
    )
    assert recipe_of(3) != recipe_of(3, meshed=True)
    ours, theirs = (jax.tree.leaves(program(26).arrays()) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("meshed", [False, True])
def test_every_program_is_traced_on_its_device(meshed: bool) -> None:
    for number in range(1, 36, 7):
        recipe = recipe_of(number, meshed)
        drawn = Program(recipe, SMALL, boundaries.mesh_of("1x2") if meshed else None)
        weights, batch = drawn.args()
        results, loss = jax.eval_shape(drawn.step(), weights, batch)
        assert loss.shape == ()
        for result, weight in zip(*map(jax.tree.leaves, (results, weights)), strict=True):
            assert (result.shape, result.dtype) == (weight.shape, weight.dtype)


@pytest.mark.parametrize(
    ("number", "meshed"),
    [(12, False), (14, False), (18, False), (23, False), (11, True), (15, True)],
)
def test_both_versions_compute_the_same_and_one_checkpoints_each_layer(
    number: int, meshed: bool
) -> None:
    drawn = program(number, meshed)
    args, results, checkpoints = drawn.arrays(), [], []
    for is_by_hand in (False, True):
        traced = jax.jit(drawn.step(is_by_hand)).trace(*args)
        checkpoints.append(str(traced.jaxpr).count("remat"))
        results.append(jax.tree.leaves(traced.lower().compile(QUICK)(*args)))
    assert checkpoints[1] > checkpoints[0]
    assert float(results[0][-1]) > 0
    for plain, ours in zip(*results, strict=True):
        np.testing.assert_allclose(plain, ours, rtol=1e-4, atol=1e-5)


# The law.


def case(plain: Any, hand: Any) -> Case:
    args = jax.numpy.ones((64, 64)), jax.numpy.ones((512, 64))
    facts = {"topology": None, "checkpoint": lambda: (hand, args)}
    return Case("case", lambda: (plain, args, ()), facts=facts)


def deep(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for _ in range(4):
            y = jax.numpy.tanh(y @ weights)
        return (y**2).mean()

    return jax.grad(loss)(weights)


def test_a_plan_as_good_as_by_hand_holds() -> None:
    measurement = by_hand.measure_here(case(deep, deep))
    [row] = measurement.rows
    assert (measurement.status, row["law"], row["numbers"]) == ("untouched", "holds", "equal bits")
    assert row["compiled_bytes"] <= row["budget_bytes"] == int(1.05 * row["hand_bytes"])
    assert row["plain_bytes"] == row["hand_bytes"] and row["step_s"] == row["hand_step_s"] > 0
    assert row["plain_cpu_s"] > 0 < row["planned_cpu_s"]


def test_a_budget_that_no_plan_fits_is_refused() -> None:
    measurement = by_hand.measure_here(case(deep, lambda weights, x: weights + 1))
    [row] = measurement.rows
    assert (measurement.status, row["law"]) == ("does not fit", "refused")
    assert measurement.reason.startswith("InfeasibleBudgetError: no plan fits")
    assert "\n" not in measurement.reason and row["smallest_bytes"] > row["budget_bytes"]


def test_an_error_of_another_kind_is_a_crash() -> None:
    def fails(weights: Any, x: Any) -> Any:
        raise ZeroDivisionError("first\nsecond")

    measurement = by_hand.measure_here(case(deep, fails))
    [row] = measurement.rows
    assert (measurement.status, row["law"]) == ("crashed", "crashed")
    assert measurement.reason == "ZeroDivisionError: first" and row["plain_bytes"] > 0


def test_the_law_is_on_seconds_and_numbers() -> None:
    assert by_hand.law_of({"step_s": 1.05, "hand_step_s": 1.0}) == "holds"
    assert by_hand.law_of({"step_s": 1.06, "hand_step_s": 1.0}) == "slower"
    row = {"step_s": 1.0, "hand_step_s": 1.0, "numbers": "within the gate"}
    assert by_hand.law_of(row) == "holds"
    for numbers in ("other bits", "beyond the gate"):
        assert by_hand.law_of({**row, "numbers": numbers}) == numbers


def test_the_view_counts_by_place_and_boundary() -> None:
    first, second = recipe_of(12), recipe_of(14)  # fori_loop of step; custom_vjp of net
    of_all = {"plain_bytes": 100, "hand_step_s": 1.0}
    rows = [
        {"case": "a", "place": "cpu", "recipe": first, "hand_bytes": 50, "law": "holds", **of_all},
        {"case": "b", "place": "cpu", "recipe": second, "hand_bytes": 50, "law": "refused",
         "smallest_bytes": 2**21, **of_all},
        {"case": "c", "place": "a100", "recipe": first, "hand_bytes": 99, "law": "slower", **of_all},
        {"case": "d", "place": "a100", "recipe": first, "law": "crashed", "plain_bytes": 100},
        {"case": "e", "place": "a100", "recipe": first, "reason": "took too long"},
    ]  # fmt: skip
    text = views.by_hand(rows)
    for line in (
        "- within 5% of the bytes and seconds by hand: 1 of 3; where that saves less than 2%: 0 of "
        "1",
        "- refused: b", "- slower: c", "- crashed: d", "- cpu: 1 of 2", "- a100: 0 of 1",
        "- fori_loop of step: 1 of 2", "- custom_vjp of net: 0 of 1",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert "at least 2" in text and "| e |" not in text
