"""Compressed messages on simulated devices: nearly the sums of one device, whatever the sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.parallel.step import data_parallel
from tests.parallel.simulator.simulated import array, mesh, simulated


def test_compressed_parts_that_hosts_do_not_divide_come_back_trimmed() -> None:
    """3 hosts of 2 devices, and 724 x 724 weights: neither a half nor a sixth of them is a multiple of 3."""
    width, rows = 724, 12

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return (jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2).sum() / rows

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradient), value

    weights, x = [array(width, width, seed=seed) / width**0.5 for seed in (1, 2)], array(rows, width)
    divided = data_parallel(step, mesh((3, 2)), compress="bfloat16")
    found, value = simulated(divided, weights, x)
    expected, plain = step(weights, x)
    assert any("bfloat16" in one.how for one in divided.sums)
    assert float(value) == pytest.approx(float(plain), rel=1e-5)
    for w, one, other in zip(weights, found, expected, strict=True):
        w, one, other = map(np.asarray, (w, one, other))
        assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other - w)
