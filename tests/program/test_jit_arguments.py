"""Writes into NNX modules that would be lost are errors; what is no array is refused with a way out."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import memplan
from memplan import UnsupportedProgramError
from memplan.program.jit_arguments import dynamic_arguments, static_arguments
from tests.program.steps import CASES

X = jnp.ones((4, 2))


class Network(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


def writes(model: Any, x: jax.Array) -> Any:
    return model(x).sum()


def reads(model: Any, x: jax.Array) -> Any:
    return nnx.value_and_grad(lambda model: model.linear(x).sum())(model)


def returns_it(model: Any, x: jax.Array) -> Any:
    return model(x).sum(), model


def returns_its_state(model: Any, x: jax.Array) -> Any:
    return model(x).sum(), nnx.state(model)


def test_a_lost_write_into_a_module_is_refused_and_named() -> None:
    with pytest.raises(
        UnsupportedProgramError, match=r" \[0\]\.norm\.mean.*return model, optimizer, loss"
    ):
        memplan.jit(writes)(Network(), X)
    with pytest.raises(UnsupportedProgramError, match=r"not nnx\.jit of it"):
        memplan.jit(nnx.jit(writes))(Network(), X)


@pytest.mark.parametrize(
    "step", [reads, returns_it, returns_its_state], ids=lambda step: step.__name__
)
def test_a_step_that_loses_nothing_is_left_alone(step: Callable[..., Any]) -> None:
    results, expected = memplan.jit(step)(Network(), X), jax.jit(step)(Network(), X)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, results, expected))


def test_whoever_splits_a_module_decides_what_comes_back() -> None:
    graph, state = nnx.split(Network())
    result = memplan.jit(lambda state, x: writes(nnx.merge(graph, state), x))(state, X)
    assert result == writes(Network(), X)


def test_other_containers_may_be_written_into() -> None:
    def step(batch: dict[str, jax.Array]) -> jax.Array:
        batch["x"] = batch["x"] * 2
        return batch["x"].sum()

    batch = {"x": X}
    assert memplan.jit(step)(batch) == 16
    assert batch["x"] is X


def test_a_model_with_functions_in_it_is_refused_with_a_way_out() -> None:
    model = eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))
    with pytest.raises(TypeError, match="activation") as caught:
        memplan.jit(lambda model, x: jax.vmap(model)(x))(model, X)
    assert "memplan.equinox.filter_jit" in "".join(caught.value.__notes__)


def test_other_type_errors_get_no_note() -> None:
    def step(x: jax.Array) -> Any:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as caught:
        memplan.jit(step)(X)
    assert "equinox" not in "".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "static" in name])
def test_the_dynamic_arguments_is_what_jax_takes(name: str) -> None:
    case = CASES[name]
    tree = jax.jit(case.step, **case.options).trace(*case.make(), **case.kwargs).in_tree
    assert (
        jax.tree.structure(dynamic_arguments(case.step, case.make(), case.kwargs, case.options))
        == tree
    )
    assert static_arguments(case.step, case.make(), case.kwargs, case.options)


def test_static_values_are_kept_apart_from_each_other() -> None:
    def step(x: Any, n: int, *, mode: str = "a") -> Any:
        return x * n

    options = {"static_argnums": 1, "static_argnames": ("mode",)}
    assert static_arguments(step, (1.0, 2), {"mode": "b"}, options) == ((1, 2), ("mode", "b"))
    assert static_arguments(step, (1.0, 2), {}, options) != static_arguments(
        step, (1.0, 3), {}, options
    )
    assert static_arguments(step, (1.0, 2), {}, {}) == ()
