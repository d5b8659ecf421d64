"""A training step in a branch, in the body of a loop, in both: planned as it is by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from tests.dense import step

TRIPS = 3

Step = Callable[[Any, jax.Array], Any]


def in_a_branch(weights: Any, x: jax.Array) -> Any:
    return jax.lax.cond(x[0, 0] < jnp.inf, step, lambda weights, x: (weights, jnp.zeros(())), weights, x)


def in_a_body(weights: Any, x: jax.Array, run: Step = step) -> Any:
    """Every trip has a batch of its own."""
    return jax.lax.scan(lambda weights, trip: run(weights, x + trip), weights, jnp.arange(TRIPS) * 1e-3)


def in_both(weights: Any, x: jax.Array) -> Any:
    """A loop in a branch in a loop."""
    both: Step = lambda weights, x: jax.lax.cond(  # noqa: E731
        x[0, 0] < jnp.inf, in_a_body, lambda weights, x: (weights, jnp.zeros(TRIPS)), weights, x
    )
    return in_a_body(weights, x, both)


STEPS: dict[str, Step] = {"branch": in_a_branch, "body": in_a_body, "body, branch, body": in_both}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_within_has_the_bits_of_the_step_as_it_is(name: str) -> None:
    run = STEPS[name]
    key = jax.random.key(0)
    weights = [jax.random.normal(jax.random.fold_in(key, layer), (64, 64)) / 8 for layer in range(6)]
    x = jax.random.normal(key, (4096, 64))
    planned = partial(memplan.jit, run, split=False)
    plain = planned().plan(weights, x)
    found = planned(budget=int(0.7 * plain.report.baseline_peak_bytes)).plan(weights, x)
    assert found.report.recomputations_found
    expected, results = (jax.tree.leaves(one(weights, x)) for one in (jax.jit(run), found.compile()))
    assert all(map(np.array_equal, expected, results))


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", STEPS)
def test_a_step_within_takes_hardly_longer_than_by_itself(name: str) -> None:
    """Four of its eight activations fewer, by copies to the host and kernels that run again."""
    args = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8, jax.ShapeDtypeStruct((65536, 1024), jnp.float32)

    def planned(run: Step, nbytes: int | None = None) -> memplan.Report:
        return memplan.jit(run, budget=nbytes, device="v100", split=False).plan(*args).report

    over = []
    for run in (step, STEPS[name]):
        plain = planned(run)
        budget = plain.baseline_peak_bytes - 4 * args[1].size * 4
        found = planned(run, budget)
        assert found.compiled_peak_bytes <= budget and found.copies_found and found.host_peak_bytes
        assert abs(found.compiled_peak_bytes - found.predicted_peak_bytes) <= 4096
        over.append(found.predicted_step_s / found.baseline_step_s)
    assert 1 <= over[1] <= 1.05 * over[0]
