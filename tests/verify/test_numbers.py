"""The gate: exact where exactness is due, tolerant by what recompilation alone changes, deaf to nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.program.trace import trace
from memplan.verify.numbers import Gate, Leaf, compare, relative_error, roundings

ONES = np.ones(4, np.float32)
EPS = float(np.finfo(np.float32).eps)


def gate(*triples: tuple[Any, Any, Any]) -> Gate:
    return compare(*zip(*triples, strict=True))


@pytest.mark.parametrize(
    "leaf",
    [
        ONES,
        np.arange(4),
        np.array([True, False]),
        np.array([np.nan, np.inf, -np.inf, 1], np.float32),
        np.zeros((0, 3), np.float32),
        np.float32(3),
        jnp.ones(3, jnp.bfloat16),
        np.array([1 + 2j, np.nan], np.complex64),
        jax.random.key(0),
    ],
    ids=[
        "floats",
        "ints",
        "bools",
        "nan and inf",
        "empty",
        "scalar",
        "bfloat16",
        "complex",
        "keys",
    ],
)
def test_equal_is_equal(leaf: Any) -> None:
    verdict = gate((leaf, leaf, leaf))
    assert verdict.passes
    assert verdict.leaves[0].planned == 0


@pytest.mark.parametrize(
    ("reference", "other"),
    [
        ([1, np.nan], [1, 1]),
        ([1, 1], [1, np.nan]),
        ([1, np.nan], [np.nan, 1]),
        ([1, np.inf], [1, -np.inf]),
        ([1, np.inf], [1, np.nan]),
        ([1, np.inf], [1, 3e38]),
    ],
)
def test_nan_and_infinity_stand_where_they_stood(
    reference: list[float], other: list[float]
) -> None:
    a, b = np.array(reference, np.float32), np.array(other, np.float32)
    assert relative_error(a, b) == float("inf")
    assert not gate((a, a, b)).passes


def test_finite_values_beside_a_nan_still_count() -> None:
    a, b = np.array([np.nan, 1], np.float32), np.array([np.nan, 1.1], np.float32)
    assert relative_error(a, b) == pytest.approx(0.1, rel=1e-3)


def test_errors_are_relative_to_the_largest() -> None:
    a, b = np.array([1e-9, 100], np.float32), np.array([2e-9, 100], np.float32)
    assert relative_error(a, b) < 1e-10
    assert relative_error(a * 0, a * 0 + 1e-3) == pytest.approx(1e-3)  # of nothing: absolute


def test_integers_are_exact() -> None:
    a = np.arange(4)
    assert relative_error(a, np.array([0, 1, 2, 4])) == 0.25
    assert not gate((a, a, np.array([0, 1, 2, 4]))).passes
    # What recompilation changes, by rounding before a cast, is allowed for that output; not for another.
    flipped = np.array([0, 1, 2, 4])
    assert gate((a, flipped, flipped)).passes
    assert not gate((a, flipped, a), (a, a, flipped)).passes


def test_other_shapes_and_dtypes_never_agree() -> None:
    assert relative_error(ONES, ONES[:3]) == float("inf")
    assert relative_error(ONES, ONES.astype(np.float64)) == float("inf")


def test_one_rounding_is_always_allowed_and_ten_are_not() -> None:
    assert gate((ONES, ONES, ONES * (1 + EPS))).passes
    assert not gate((ONES, ONES, ONES * (1 + 10 * EPS))).passes


def test_what_is_computed_in_a_coarse_type_may_be_off_by_its_rounding() -> None:
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, float]:
        return (x.astype(jnp.bfloat16) * 2).astype(jnp.float32), y + 1, 1.0

    program = trace(step, (jnp.ones(2), jnp.ones(2)), {}, {})
    coarse, fine = float(jnp.finfo(jnp.bfloat16).eps), float(jnp.finfo(jnp.float32).eps)
    assert roundings(program.jaxpr) == [coarse, fine, 0.0]
    off = [np.float32([1, 1.005])] * 2
    leaves = compare(*([np.float32([1, 1])] * 2,) * 2, off, coarsest=[coarse, fine]).leaves
    assert [leaf.planned <= leaf.tolerance for leaf in leaves] == [True, False]


def test_recompilation_sets_the_tolerance() -> None:
    assert gate((ONES, ONES * 1.001, ONES * 1.003)).passes
    assert not gate((ONES, ONES * 1.001, ONES * 1.01)).passes


def test_noise_widens_its_own_tolerance_only() -> None:
    noise = (ONES * 1e-9, ONES * 3e-9, ONES * 2e-9)  # 200 % off by recompilation alone
    exact = (ONES, ONES, ONES * 1.001)
    calm = (ONES, ONES, ONES)
    assert gate(noise, calm, calm).passes
    assert not gate(noise, exact, calm).passes


def test_the_median_output_lends_its_rounding() -> None:
    usual = (ONES, ONES * (1 + 20 * EPS), ONES)
    # nothing by recompilation, within four times the others' by planning
    lucky = (ONES, ONES, ONES * (1 + 50 * EPS))
    assert gate(usual, usual, lucky).passes
    assert not gate(lucky).passes


def test_the_worst_output_is_named() -> None:
    verdict = gate((ONES, ONES, ONES), (ONES, ONES, ONES * 2))
    assert verdict.worst == 1
    assert "results beyond tolerance: output 1 is off by 1.0e+00" in str(verdict)
    assert "results within tolerance" in str(gate((ONES, ONES, ONES)))
    assert str(Gate(())) == "no outputs"
    assert Gate(()).passes
    assert not Gate((Leaf(0.0, float("nan"), 1.0),)).passes


def test_redrawn_randomness_is_caught() -> None:
    mask, redraw = (jax.random.bernoulli(jax.random.key(seed), 0.5, (64,)) for seed in (0, 1))
    assert not gate((mask, mask, redraw)).passes
    assert not gate((jax.random.key(0), jax.random.key(0), jax.random.key(1))).passes
