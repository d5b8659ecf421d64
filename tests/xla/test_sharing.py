"""Opcodes are spelled as HLO prints them. What may be written over what is compared with XLA in `test_buffers`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.xla.sharing import ELEMENTWISE


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (jax.lax.clz, jnp.int32),
        (jax.lax.population_count, jnp.int32),
        (jax.lax.bitwise_not, jnp.int32),
        (jax.lax.cbrt, jnp.float32),
        (jax.lax.erf, jnp.float32),
        (jax.lax.expm1, jnp.float32),
        (jax.lax.log1p, jnp.float32),
        (jax.lax.logistic, jnp.float32),
        (jax.lax.round, jnp.float32),
        (jax.lax.is_finite, jnp.float32),
        (jax.lax.rsqrt, jnp.float32),
        (jax.lax.tan, jnp.float32),
    ],
)
def test_elementwise_opcodes_are_those_that_hlo_prints(function: Callable[..., Any], dtype: Any) -> None:
    text = jax.jit(function).lower(jnp.ones(3, dtype)).as_text("hlo")
    (opcode,) = re.findall(r"ROOT \S+ = \S+ ([\w-]+)\(", text)
    assert opcode in ELEMENTWISE
