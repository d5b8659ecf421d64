"""jax's own tools that take a jitted or a compiled step."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import memplan
from memplan import UnsupportedProgramError
from tests.test_pipeline import Picky

X = np.ones((2048, 64), np.float32)
WEIGHTS = [np.eye(64, dtype=np.float32)] * 6
BUDGET = "2MiB"  # the step takes 3.3 MiB as it is


def train(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return (hidden**2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda weight, part: weight - 0.1 * part, weights, gradient), value


def temporaries(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_loaded_executable_runs_the_plan() -> None:
    compiled = memplan.jit(train, budget=BUDGET).lower(WEIGHTS, X).compile()
    plain = jax.jit(train).lower(WEIGHTS, X).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    temp_nbytes, loaded_nbytes, plain_nbytes = map(temporaries, (compiled, loaded, plain))
    assert loaded_nbytes == temp_nbytes < plain_nbytes
    jax.tree.map(np.testing.assert_array_equal, loaded(WEIGHTS, X), compiled(WEIGHTS, X))
    assert (loaded.in_tree, loaded.out_tree) == (plain.in_tree, plain.out_tree)


_ELSEWHERE = """
import pickle, sys, jax, numpy
from jax.experimental import serialize_executable
with open(sys.argv[1], "rb") as file:
    loaded = serialize_executable.deserialize_and_load(*pickle.load(file))
x, weights = numpy.ones((2048, 64), numpy.float32), [numpy.eye(64, dtype=numpy.float32)] * 6
print(loaded(weights, x)[1].item(), loaded.memory_analysis().temp_size_in_bytes, "memplan" in sys.modules)
"""


@pytest.mark.slow
def test_another_process_needs_no_memplan(tmp_path: Path) -> None:
    compiled = memplan.jit(train, budget=BUDGET).lower(WEIGHTS, X).compile()
    path = tmp_path / "step"
    path.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    command = [sys.executable, "-c", _ELSEWHERE, str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    value = compiled(WEIGHTS, X)[1].item()
    assert printed == [str(value), str(temporaries(compiled)), "False"]


def test_a_donated_and_named_argument_survives() -> None:
    step = memplan.jit(train, budget=BUDGET, donate_argnums=0)
    compiled = step.lower(WEIGHTS, x=X).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    weights = [jnp.asarray(weight) for weight in WEIGHTS]
    _, value = loaded(weights, x=X)
    assert all(weight.is_deleted() for weight in weights)
    assert value == compiled([jnp.asarray(weight) for weight in WEIGHTS], x=X)[1]


def test_what_memplan_does_in_each_call_is_not_serialized() -> None:
    wide = [jnp.ones((1024, 1024))]
    moved = memplan.jit(lambda state: [2 * state[0]], host_state=0, donate_argnums=0)
    moved = moved.lower(wide).compile()
    with pytest.raises(UnsupportedProgramError, match=r"moves state .* without host_state="):
        serialize_executable.serialize(moved)
    scaled = memplan.jit(lambda scale, x: scale.value * x).lower(Picky(jnp.ones(())), X).compile()
    with pytest.raises(UnsupportedProgramError, match="containers"):
        serialize_executable.serialize(scaled)


def test_export_refuses_to_lose_the_plan() -> None:
    step = memplan.jit(train, budget=BUDGET)
    for argument in (X, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 64"), X.dtype)):
        with pytest.raises(UnsupportedProgramError, match=r"export train .*serialize_executable"):
            jax.export.export(step)(WEIGHTS, argument)


def test_a_size_without_a_number_is_named() -> None:
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 64"), X.dtype)
    step = memplan.jit(train, budget=BUDGET)
    for plan in (step.plan, step.lower, lambda *args: step.trace(*args).lower()):
        with pytest.raises(UnsupportedProgramError, match=r"\[1\] has the shape \(b, 64\)"):
            plan(WEIGHTS, shape)
    assert step.eval_shape(WEIGHTS, shape)[1].shape == ()
