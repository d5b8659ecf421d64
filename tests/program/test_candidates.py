"""The programs that are proposed for a step, for a limit or for any."""

import jax
import jax.numpy as jnp
from jax import lax

from memplan.hardware import catalog
from memplan.planning.transforms import StateOnHost
from memplan.program.candidates import Candidates
from memplan.program.trace import trace
from tests.xla.steps import array

V100 = catalog.named("v100")


def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    """By a scan over layers that widen 16 numbers to 512."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, weights)[0].sum()


def test_no_limit_on_the_device_changes_the_smallest_slabs() -> None:
    program = trace(jax.grad(loss), (array(4, 16, 512), array(1024, 16)), {}, {})
    limits = 1, 64 << 20  # no slabs fit, and all fit beside what the loop stacks
    candidates = [Candidates(program, V100, limit, 1 << 34, StateOnHost(())) for limit in limits]
    assert candidates[1].slabs.may_fit(64 << 20, 1 << 34)
    hopeless, ample = (each.in_smallest_slabs for each in candidates)
    assert hopeless and all(program.in_slabs and program.loops for program in hopeless)
    assert [each.transforms for each in ample] == [each.transforms for each in hopeless]
