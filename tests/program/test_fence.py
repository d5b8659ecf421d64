"""What holds the order: fences, zeros of a segment's own, copies in the device's layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.program import compat
from memplan.program.extract import extract
from memplan.program.fence import Channels, fence, fragile_zeros
from memplan.program.rewrite import rewrite
from memplan.program.trace import trace
from tests.program.steps import by_hand


def pooled(x: jax.Array) -> jax.Array:
    """The gradient of max pooling scatters into a whole buffer of zeros."""
    return jax.grad(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID").sum())(x)


def convolved(layout: tuple[str, str, str], dtype: Any = jnp.float32) -> Any:
    shape = {"N": 1, "C": 2, "D": 4, "H": 4, "W": 4}

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), "SAME", dimension_numbers=layout)

    x = jnp.ones([shape[axis] for axis in layout[0]], dtype)
    w = jnp.ones([{"D": 3, "H": 3, "W": 3, "I": 2, "O": 2}[axis] for axis in layout[1]], dtype)
    return trace(step, (x, w), {}, {})


def test_every_result_of_a_fence_waits_for_every_value() -> None:
    values = (jnp.ones(2), jnp.arange(3), jax.random.key(0), np.True_)
    jaxpr = jax.make_jaxpr(lambda *values: fence(values))(*values).jaxpr
    (barrier,) = jaxpr.eqns
    assert list(barrier.invars) == list(jaxpr.invars)
    assert list(barrier.outvars) == list(jaxpr.outvars)


def test_nothing_to_hold_is_no_fence() -> None:
    assert fence([]) == []


def test_zeros_that_a_scatter_needs_are_fragile() -> None:
    program = trace(pooled, (jnp.arange(8.0),), {}, {})
    assert fragile_zeros(program.jaxpr.jaxpr.eqns) == {((8,), jnp.dtype("float32"))}
    assert not fragile_zeros(trace(jnp.sin, (jnp.ones(8),), {}, {}).jaxpr.jaxpr.eqns)


def test_a_fragile_zero_comes_through_the_fence() -> None:
    def step(x: jax.Array) -> Any:
        return pooled(x), jnp.maximum(x, 0.0)

    program = trace(step, (jnp.arange(8.0),), {}, {})
    graph = extract(program)
    words = [word for op in range(len(graph.ops)) for word in (f"compute {op}", "|")]
    planned = rewrite(program, graph, by_hand(graph, *words))
    (maximum,) = [eqn for eqn in planned.jaxpr.eqns if eqn.primitive.name == "max"]
    made = next(eqn for eqn in planned.jaxpr.eqns if maximum.invars[1] in eqn.outvars)
    assert made.primitive.name == "optimization_barrier"


def test_channels_last_values_are_held_and_copied_with_channels_second() -> None:
    channels = Channels.of_program(convolved(("NHWC", "HWIO", "NHWC")).jaxpr.jaxpr.eqns)
    assert channels.ranks == {4}
    image = jnp.arange(40.0).reshape(1, 4, 5, 2)
    assert channels.second(image).shape == (1, 2, 4, 5)
    assert jnp.array_equal(channels.last(channels.second(image), image.shape), image)
    jaxpr = jax.make_jaxpr(channels.to_host)(image).jaxpr
    assert jaxpr.outvars[0].aval.shape == (1, 2, 4, 5)  # type: ignore[attr-defined]
    back = jax.make_jaxpr(lambda x: channels.to_device(channels.to_host(x), x.shape))(image).jaxpr
    assert back.outvars[0].aval.shape == image.shape  # type: ignore[attr-defined]


def test_filters_of_the_same_rank_are_left_alone() -> None:
    program = convolved(("NHWC", "HWIO", "NHWC"))
    channels = Channels.of_program(program.jaxpr.jaxpr.eqns)
    weights = jnp.ones(compat.aval_of(program.jaxpr.jaxpr.invars[1]).shape)
    assert channels.second(weights).shape == weights.shape
    assert channels.last(weights, weights.shape).shape == weights.shape


def test_an_input_passes_fences_as_it_is_and_what_is_made_from_it_channels_second() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        again = partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
                        dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        return again(x, w) + again(x, w * 2.0)

    program = trace(step, (jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2))), {}, {})
    graph = extract(program)
    planned = rewrite(program, graph, by_hand(graph, "compute 0", "|", *(f"compute {n}" for n in (1, 2, 3)))).jaxpr
    (barrier,) = [eqn for eqn in planned.eqns if eqn.primitive.name == "optimization_barrier" and eqn.invars]
    assert planned.invars[0] in barrier.invars
    assert [var.aval.shape for var in barrier.invars if var not in planned.invars] == [(1, 2, 4, 4)]  # type: ignore[attr-defined]


def test_other_values_are_copied_as_they_are() -> None:
    for program in (convolved(("NCHW", "OIHW", "NCHW")), convolved(("NHWC", "HWIO", "NHWC"), jnp.bfloat16)):
        assert not Channels.of_program(program.jaxpr.jaxpr.eqns).ranks
    channels = Channels(frozenset({4}))
    assert jax.make_jaxpr(channels.to_host)(jnp.ones((3, 4))).jaxpr.outvars[0].aval.shape == (3, 4)  # type: ignore[attr-defined]


def test_volumes_are_copied_with_channels_second_whatever_their_width() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        program = convolved(("NDHWC", "DHWIO", "NDHWC"), dtype)
        assert Channels.of_program(program.jaxpr.jaxpr.eqns).ranks == {5}


def test_copies_carry_every_dtype() -> None:
    channels = Channels(frozenset())
    for value in (jnp.ones(3, jnp.bfloat16), jnp.arange(3, dtype=jnp.uint8), jnp.array([True]), jax.random.key(0)):
        back = jax.jit(lambda x: channels.to_device(channels.to_host(x), x.shape))(value)
        assert back.dtype == value.dtype
