"""Stacks of layers in host memory: found, read and updated a layer at a time, with the same numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import memplan
from memplan.program import compat
from memplan.program.lowerable import Lowerable, as_step
from memplan.program.state.host_state import donation_pairs, large_leaves, offload_state
from memplan.program.state.layerwise import (
    LayerwiseState,
    StreamedScan,
    Update,
    UpdatingScan,
    layerwise_state,
)
from memplan.program.trace import Program, trace
from memplan.request import target_of
from tests.arrays import assert_close, shapes_of
from tests.xla.test_target import needs_compiler

LAYERS, WIDTH = 4, 512
OPTIMIZER = optax.adamw(1e-3)
Step = Callable[..., Any]


def start(optimizer: optax.GradientTransformation = OPTIMIZER) -> Any:
    """Every stack is 4 MiB, the table 2 MiB."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "table": 0.02 * jax.random.normal(keys[0], (1024, WIDTH)),
        "up": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(keys[2], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
    }
    return params, optimizer.init(params)


def step_of(optimizer: optax.GradientTransformation = OPTIMIZER, reverse: bool = False) -> Step:
    def step(state: Any, tokens: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
                return x + jnp.tanh(x @ weights[0]) @ weights[1], None

            x, _ = jax.lax.scan(
                layer, params["table"][tokens], (params["up"], params["down"]), reverse=reverse
            )
            return jnp.square(x - y).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def batch() -> tuple[jax.Array, jax.Array]:
    return jax.random.randint(jax.random.key(1), (64,), 0, 1024), jax.random.normal(
        jax.random.key(2), (64, WIDTH)
    )


def program(step: Step, *args: Any) -> Program:
    return trace(step, shapes_of(args), {}, {"donate_argnums": 0})


def layerwise(program: Program) -> LayerwiseState:
    inputs, outputs = program.jaxpr.jaxpr.invars, program.jaxpr.jaxpr.outvars
    on_host = large_leaves(program, (0,))
    aliases = {
        outputs[number]: inputs[position]
        for number, position in donation_pairs(inputs, outputs, on_host)
    }
    return layerwise_state(program.flat, frozenset(map(inputs.__getitem__, on_host)), aliases)


@pytest.mark.slow
def test_stacks_that_scans_slice_and_their_moments_are_found() -> None:
    traced = program(step_of(), start(), *batch())
    state = layerwise(traced)
    # not the table and its moments
    assert len(large_leaves(traced, (0,))) == 9 and len(state.stacks) == 6
    (scan,) = (equation for equation in state.equations if isinstance(equation, UpdatingScan))
    assert not any(isinstance(equation, Update) for equation in state.equations)
    assert scan.update.trips == LAYERS and len(scan.update.results) == 6
    assert set(scan.update.on_host) == state.stacks


def test_a_stack_that_is_read_whole_is_none() -> None:
    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            x_last, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
            return jnp.square(x_last).sum() + jnp.square(weights.sum(axis=0)).sum()

        return weights - 0.1 * jax.grad(loss)(weights), x

    weights = jnp.zeros((LAYERS, WIDTH, WIDTH))
    assert not layerwise(program(step, weights, jnp.zeros((8, WIDTH)))).stacks


def test_a_norm_over_all_gradients_leaves_the_rest_layerwise() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZER)
    state = layerwise(program(step_of(optimizer), start(optimizer), *batch()))
    assert len(state.stacks) == 6
    streamed = StreamedScan, Update, UpdatingScan
    kinds = [type(equation) for equation in state.equations if isinstance(equation, streamed)]
    assert kinds == [StreamedScan, StreamedScan, Update]  # all gradients first


def test_outputs_take_donated_inputs_of_their_type_first_come() -> None:
    closed = jax.make_jaxpr(lambda a, b, c: (b + 1, a + 1, c + 1))(
        jnp.zeros(3), jnp.zeros(3), jnp.zeros(4)
    )
    assert list(donation_pairs(closed.jaxpr.invars, closed.jaxpr.outvars, {0, 1, 2})) == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert list(donation_pairs(closed.jaxpr.invars, closed.jaxpr.outvars, {1})) == [(0, 1)]


@pytest.mark.parametrize(
    ("optimizer", "reverse"),
    [
        (OPTIMIZER, True),
        (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, weight_decay=0.1)), False),
        (optax.sgd(1e-2, momentum=0.9, nesterov=True), False),
        (optax.lion(1e-4), False),
    ],
    ids=["adamw", "clipped", "momentum", "lion"],
)
@pytest.mark.slow
def test_training_layer_by_layer_is_training(
    optimizer: optax.GradientTransformation, reverse: bool
) -> None:
    step, state = step_of(optimizer, reverse), start(optimizer)
    planned = memplan.jit(step, host_state=0, donate_argnums=0, verify="numbers").plan(
        state, *batch()
    )
    compiled, plain = planned.compile(), jax.jit(step)
    device_state, host_state = state, planned.place(jax.tree.map(jnp.copy, state))
    for _ in range(10):
        device_state, expected_loss = plain(device_state, *batch())
        host_state, loss = compiled(host_state, *batch())
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(host_state, device_state, rtol=1e-3, atol=1e-4)


@needs_compiler
@pytest.mark.gpu_aot
def test_a_described_gpu_never_holds_a_stack() -> None:
    state = jax.eval_shape(start)
    traced = program(step_of(), state, *batch())
    offloaded = large_leaves(traced, (0,))
    inputs = traced.jaxpr.jaxpr.invars
    nbytes = sum(compat.nbytes_of(inputs[position].aval) for position in offloaded)
    moved = offload_state(traced, offloaded)
    step = as_step(moved, moved.jaxpr)
    lowerable = Lowerable(step, shapes_of((state, *batch())), {}, moved.options, moved.on_host)
    compiled = target_of("v100").compile(lowerable)
    assert compiled.memory.host_bytes == nbytes  # updated in place
    stacks = sum(compat.nbytes_of(var.aval) for var in layerwise(traced).stacks)
    assert compiled.memory.device_bytes < stacks  # two stacks of gradients, the table, slices
