"""A training step in a branch, in the body of a loop, in both: planned as it is by itself."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from tests.dense import step
from tests.within import WITHIN, Step


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "body")) for name in WITHIN]
)
def test_a_step_within_has_the_bits_of_the_step_as_it_is(name: str) -> None:
    run = WITHIN[name](step)
    key = jax.random.key(0)
    weights = [
        jax.random.normal(jax.random.fold_in(key, layer), (64, 64)) / 8 for layer in range(6)
    ]
    x = jax.random.normal(key, (4096, 64))
    planned = partial(memplan.jit, run, split=False)
    plain = planned().plan(weights, x)
    result = planned(budget=int(0.7 * plain.report.baseline_peak_bytes)).plan(weights, x)
    assert result.report.recomputations_found
    expected, results = (
        jax.tree.leaves(call(weights, x)) for call in (jax.jit(run), result.compile())
    )
    assert all(map(np.array_equal, expected, results))


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "branch")) for name in WITHIN]
)
def test_a_step_within_takes_hardly_longer_than_by_itself(name: str) -> None:
    """Four of its eight activations fewer, by copies to the host and kernels that run again."""
    args = (
        [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((65536, 1024), jnp.float32),
    )

    def planned(run: Step, nbytes: int | None = None) -> memplan.Report:
        return memplan.jit(run, budget=nbytes, device="v100", split=False).plan(*args).report

    over = []
    for run in (step, WITHIN[name](step)):
        plain = planned(run)
        budget = plain.baseline_peak_bytes - 4 * args[1].size * 4
        result = planned(run, budget)
        assert (
            result.compiled_peak_bytes <= budget and result.copies_found and result.host_peak_bytes
        )
        assert abs(result.compiled_peak_bytes - result.predicted_peak_bytes) <= 4096
        over.append(result.predicted_step_s / result.baseline_step_s)
    assert 1 <= over[1] <= 1.05 * over[0]
