"""Training steps with a scan over layers, none of which fits: few residuals, and slabs in the bodies of the scan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from tests.cases.within_share import QUICK, Made, assert_same, descended, normal, within_share

TOKENS, WIDTH, LAYERS = 384, 8, 3
NO_LIMIT = 1 << 40


def attention() -> Made:
    """Every token reads every other, in each of the layers."""

    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        query, key, value = (x @ weight for weight in weights)
        return x + jax.nn.softmax(query @ key.T / WIDTH**0.5) @ value, None

    return trained(layer, normal(LAYERS, 3, WIDTH, WIDTH, scale=WIDTH**-0.5))


def wide() -> Made:
    """Each layer makes forty times as many numbers as it returns."""

    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        into, out = weights
        return x + jnp.tanh(jnp.sin(x @ into) * (x @ into)) @ out.T, None

    return trained(layer, normal(LAYERS, 2, WIDTH, 40 * WIDTH, scale=WIDTH**-0.5 / 6))


def trained(layer: Any, weights: jax.Array) -> Made:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()

    def step(weights: jax.Array, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return descended(weights, gradients), value

    return step, (weights, normal(TOKENS, WIDTH, seed=1))


@pytest.mark.parametrize(
    ("make", "share"), [(attention, 0.1), pytest.param(wide, 0.12, marks=pytest.mark.slow)]
)
def test_layers_that_do_not_fit_are_recomputed_in_slabs(make: Any, share: float) -> None:
    step, args = make()
    run = within_share(share, step, args)
    assert len(run.planned.report.slab_loops) >= 2
    assert any("trips" in row.name for row in run.planned.report.decisions)
    assert_same(run.planned.compile()(*args), run.plain(*args), run)
    followed = memplan.jit(step, plan=run.planned.plan, compiler_options=QUICK).plan(*args)
    assert_same(followed.compile()(*args), run.planned.compile()(*args), run)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("make", [attention, pytest.param(wide, marks=pytest.mark.slow)])
def test_on_a_gpu_it_takes_a_part_of_what_one_layer_does(make: Any) -> None:
    step, args = make()
    plain = memplan.jit(step, device="a100", budget=NO_LIMIT, donate_argnums=0).plan(*args)
    budget = plain.report.compiled_peak_bytes // 10
    report = memplan.jit(step, device="a100", budget=budget, donate_argnums=0).plan(*args).report
    assert report.status == "fits" and report.compiled_peak_bytes <= budget
    assert len(report.slab_loops) >= 2
