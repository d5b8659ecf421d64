"""A step as it is planned, called like the step; and the gate that sees other numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.compilation.outcome import Outcome
from memplan.errors import MemplanError
from memplan.outcome.execute import Runner, numbers_gate
from memplan.program.trace import StateOnHost, trace
from memplan.program.transforms.host_state import place_leaf
from memplan.xla.target import Executable, Target
from tests.compilation.modules import CPU
from tests.compilation.outcomes import outcome


def step(weights: Any, x: jax.Array) -> Any:
    return {"w": weights["w"] + x}, x.sum()


def wrong(weights: Any, x: jax.Array) -> Any:
    return {"w": weights["w"] + 1.0001 * x}, x.sum()


ARGS = ({"w": jnp.arange(4.0)}, jnp.ones(4))
PROGRAM = trace(step, ARGS, {}, {"donate_argnums": 0})


def compiled_as(call: Any, on_host: bool = False) -> Outcome:
    """As if the step had been compiled into that."""
    moved = PROGRAM.transform(StateOnHost(frozenset({0}), frozenset({0})), None)
    found = outcome(moved if on_host else PROGRAM, 10)
    executable = Executable(call, found.executable.memory)
    return replace(found, executable=executable, target=Target(CPU, described=False), args=ARGS)


def test_a_runner_says_that_it_ran() -> None:
    run = Runner(compiled_as(step))
    assert not run.ran
    new, total = run(*ARGS)
    assert run.ran and total == 4
    np.testing.assert_array_equal(new["w"], np.arange(4.0) + 1)


def test_state_on_the_host_is_fetched_given_up_and_returned_there() -> None:
    kinds: list[str] = []

    def call(weights: Any, x: jax.Array) -> Any:
        kinds.append(weights["w"].sharding.memory_kind)
        return step(weights, x)

    state = place_leaf(jnp.arange(4.0), on_host=True)
    new, total = Runner(compiled_as(call, on_host=True))({"w": state}, ARGS[1])
    assert kinds == [jax.devices()[0].default_memory().kind] and kinds != ["pinned_host"]
    assert new["w"].sharding.memory_kind == "pinned_host" and total.sharding.memory_kind == kinds[0]
    assert state.is_deleted()


def test_the_gate_passes_the_same_and_stops_other_numbers() -> None:
    assert numbers_gate(compiled_as(step), ARGS, {}).passes
    assert not numbers_gate(compiled_as(wrong), ARGS, {}).passes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(ARGS))


def test_numbers_need_arrays() -> None:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), ARGS)
    with pytest.raises(MemplanError, match="pass arrays"):
        numbers_gate(compiled_as(step), shapes, {})
