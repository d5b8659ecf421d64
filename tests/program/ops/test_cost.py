"""What the equations of loops' bodies are taken for."""

import jax
import jax.numpy as jnp
from jax import lax

from memplan.program import ops


def test_reductions_along_rows_are_those_over_the_last_axis_alone():
    def along_rows(function):
        (eqn,) = jax.make_jaxpr(function)(jnp.ones((2, 3, 4))).jaxpr.eqns
        return ops.is_along_rows(eqn)

    assert along_rows(lambda x: lax.reduce_max(x, (2,))) and along_rows(
        lambda x: lax.reduce_sum(x, (2,))
    )
    assert not along_rows(lambda x: lax.reduce_sum(x, (1,)))
    assert not along_rows(lambda x: lax.reduce_sum(x, (1, 2)))
    assert not along_rows(lambda x: lax.argmax(x, 1, jnp.int32))
    assert not along_rows(lambda x: lax.exp(x))
