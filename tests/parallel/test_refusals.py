"""Steps that cannot be divided are refused before anything runs, with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.parallel.simulator.simulated import array, mesh

from memplan.errors import UnsupportedProgramError
from memplan.parallel.step import data_parallel

W, X = array(6, 6, seed=1), array(24, 6)
HERE = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,))
PART = NamedSharding(HERE, PartitionSpec("device"))


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (lambda w, x: jax.lax.with_sharding_constraint(x @ w, PART), "sharding_constraint at .*sets the sharding"),
        (lambda w, x: jax.jit(jnp.tanh, in_shardings=PART)(x @ w), "jit at .*sets the sharding"),
        (
            lambda w, x: jax.shard_map(jnp.tanh, mesh=HERE, in_specs=PART.spec, out_specs=PART.spec)(x),
            "shard_map at .*written for several devices already",
        ),
        (lambda w, x: io_callback(np.tanh, x, x), "io_callback at .*every device of a divided step would"),
        (lambda w, x: jax.lax.map(lambda r: (jax.debug.print("{}", r[0], ordered=True), r)[1], x), "ordered=False"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_line(step: Callable[..., Any], told: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=told) as refused:
        data_parallel(step, mesh((4,))).divided((W, X))
    assert "test_refusals.py:" in str(refused.value)
