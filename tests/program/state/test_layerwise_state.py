"""Stacks of layers in host memory: found, read and updated a layer at a time, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import memplan
from memplan.pipeline import target_of
from memplan.program import compat
from memplan.program.lowerable import Lowerable, as_step
from memplan.program.state.host_state import donation_pairs, large_leaves, offload_state
from memplan.program.state.layerwise import LayerwiseState, StreamedScan, Update, UpdatingScan, layerwise_state
from memplan.program.trace import Program, trace
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

            x, _ = jax.lax.scan(layer, params["table"][tokens], (params["up"], params["down"]), reverse=reverse)
            return jnp.square(x - y).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def batch() -> tuple[jax.Array, jax.Array]:
    return jax.random.randint(jax.random.key(1), (64,), 0, 1024), jax.random.normal(jax.random.key(2), (64, WIDTH))


def program(step: Step, *args: Any) -> Program:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    return trace(step, shapes, {}, {"donate_argnums": 0})


def layerwise(known: Program) -> LayerwiseState:
    inputs, outputs = known.jaxpr.jaxpr.invars, known.jaxpr.jaxpr.outvars
    on_host = large_leaves(known, (0,))
    aliases = {outputs[number]: inputs[position] for number, position in donation_pairs(inputs, outputs, on_host)}
    return layerwise_state(known.flat, frozenset(inputs[position] for position in on_host), aliases)


@pytest.mark.slow
def test_stacks_that_scans_slice_and_their_moments_are_found() -> None:
    known = program(step_of(), start(), *batch())
    found = layerwise(known)
    assert len(large_leaves(known, (0,))) == 9 and len(found.stacks) == 6  # not the table and its moments
    (scan,) = (one for one in found.equations if isinstance(one, UpdatingScan))
    assert not any(isinstance(one, Update) for one in found.equations)
    assert scan.update.trips == LAYERS and set(scan.update.on_host) == found.stacks and len(scan.update.results) == 6


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
    found = layerwise(program(step_of(optimizer), start(optimizer), *batch()))
    assert len(found.stacks) == 6
    kinds = [type(one) for one in found.equations if isinstance(one, StreamedScan | Update | UpdatingScan)]
    assert kinds == [StreamedScan, StreamedScan, Update]  # all gradients first


def test_outputs_take_donated_inputs_of_their_type_first_come() -> None:
    closed = jax.make_jaxpr(lambda a, b, c: (b + 1, a + 1, c + 1))(jnp.zeros(3), jnp.zeros(3), jnp.zeros(4))
    assert list(donation_pairs(closed.jaxpr.invars, closed.jaxpr.outvars, {0, 1, 2})) == [(0, 0), (1, 1), (2, 2)]
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
def test_training_layer_by_layer_is_training(optimizer: optax.GradientTransformation, reverse: bool) -> None:
    step, state = step_of(optimizer, reverse), start(optimizer)
    planned = memplan.jit(step, host_state=0, donate_argnums=0, verify="numbers").plan(state, *batch())
    compiled, plain = planned.compile(), jax.jit(step)
    here, there = state, planned.place(jax.tree.map(jnp.copy, state))
    for _ in range(10):
        here, expected = plain(here, *batch())
        there, found = compiled(there, *batch())
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    for expected, found in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@needs_compiler
@pytest.mark.gpu_aot
def test_a_described_gpu_never_holds_a_stack() -> None:
    state = jax.eval_shape(start)
    known = program(step_of(), state, *batch())
    held = large_leaves(known, (0,))
    nbytes = sum(compat.nbytes_of(known.jaxpr.jaxpr.invars[one].aval) for one in held)
    moved = offload_state(known, held)
    step = as_step(moved, moved.jaxpr)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, *batch()))
    compiled = target_of("v100").compile(Lowerable(step, shapes, {}, moved.options, moved.on_host))
    assert compiled.memory.host_bytes == nbytes  # updated in place
    stacks = sum(compat.nbytes_of(var.aval) for var in layerwise(known).stacks)
    assert compiled.memory.device_bytes < stacks  # two stacks of gradients, the table, slices
