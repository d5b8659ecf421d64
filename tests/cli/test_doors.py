"""Factories that return the steps of every jit: all options and commands work for all of them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.cli.doors import plain_step
from memplan.cli.factory import FactoryError
from memplan.cli.options import StepCommandOptions
from memplan.cli.steps import saved_plan
from tests.cli.command import run

FACTORIES = """
import memplan, tests.cli.test_doors as doors
def make(name): return doors.STEPS[name]()
"""


class Weights(eqx.Module):
    w: jax.Array
    activation: Any


class Layer(flax.nnx.Module):
    def __init__(self) -> None:
        self.w = flax.nnx.Param(jnp.eye(64))


def step(w: Any, x: Any, power: int = 2) -> Any:
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w) ** power).sum())(w)


def equinox_step(model: Weights, x: Any) -> Weights:
    return Weights(step(model.w, x), model.activation)


def nnx_step(layer: Layer, x: Any) -> None:
    layer.w[...] = step(layer.w[...], x)


ARGS = jnp.eye(64), jnp.ones((512, 64))
MODEL = Weights(ARGS[0], jnp.tanh), ARGS[1]
OWN = {"budget": "100MiB", "device": None}
STEPS: dict[str, Any] = {
    "plain": lambda: (step, ARGS),
    "jax": lambda: (jax.jit(step, donate_argnums=0, static_argnums=2), (*ARGS, 2)),
    "memplan": lambda: (
        memplan.jit(step, donate_argnames="w", static_argnames="power", **OWN),
        (*ARGS, 2),
    ),
    "equinox": lambda: (eqx.filter_jit(equinox_step, donate="all"), MODEL),
    "memplan.equinox": lambda: (memplan.equinox.filter_jit(equinox_step, **OWN), MODEL),
    "nnx": lambda: (flax.nnx.jit(nnx_step, donate_argnums=0), (Layer(), ARGS[1])),
    "memplan.nnx": lambda: (
        memplan.nnx.jit(nnx_step, donate_argnums=0, graph_updates=False, **OWN),
        (Layer(), ARGS[1]),
    ),
}
DONATED = {
    "jax": (0,),
    "memplan": (0,),
    "equinox": (0, 1, 2),  # the last is the module that is the step, here none
    "memplan.equinox": (),
    "nnx": (0,),
    "memplan.nnx": (0,),
}


@pytest.fixture(autouse=True)
def factories(workshop: Path) -> Iterator[None]:
    (workshop / "factories.py").write_text(FACTORIES)
    yield
    sys.modules.pop("factories", None)


@pytest.mark.parametrize("name", STEPS)
def test_the_plain_step_computes_what_the_step_does(name: str) -> None:
    plain = plain_step(*STEPS[name]())
    arrays = jax.tree.leaves(plain.function(*plain.args))
    expected = step(*ARGS)
    assert any(a.shape == expected.shape and np.allclose(a, expected) for a in arrays)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), plain.args)
    assert jax.eval_shape(plain.function, *shapes) is not None
    assert plain.options.get("donate_argnums") == DONATED.get(name)


def test_a_plain_function_of_an_equinox_module_needs_filter_jit() -> None:
    with pytest.raises(FactoryError, match=r"args\[0\].activation is a .*equinox.filter_jit"):
        plain_step(equinox_step, MODEL)


@pytest.mark.parametrize("name", STEPS)
def test_an_option_replaces_the_steps_own(name: str) -> None:
    plain = plain_step(*STEPS[name]())
    own = StepCommandOptions().of(plain)
    line = StepCommandOptions(device="v100", split=False, donate="1", host_state=["0"])
    replaced = line.of(plain)
    assert own["donate_argnums"] == DONATED.get(name, (0,)) and own["split"] == "auto"
    assert replaced == {
        **own,
        "device": "v100",
        "split": False,
        "donate_argnums": (1,),
        "host_state": (0,),
    }


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # Equinox donates x
@pytest.mark.parametrize("name", STEPS)
def test_inspect_plans_each_within_a_budget_of_the_command(name: str, workshop: Path) -> None:
    words = "--budget", "480KiB", "--verify", "none", "--json", "-"
    result = run("inspect", f"factories:make(name={name!r})", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["budget_bytes"] == 480 << 10


@pytest.mark.parametrize("name", ["memplan", "memplan.equinox", "memplan.nnx"])
def test_the_own_budget_stays_unless_the_command_names_one(name: str, workshop: Path) -> None:
    for words, budget in ((), 100 << 20), (("--budget", "50MiB"), 50 << 20):
        factory = f"factories:make(name={name!r})"
        saved = "--against", f"{budget}.json", "--save"
        for command in ("inspect", factory), ("check", factory, *saved):
            result = run(*command, *words, "--json", "-")
            assert result.exit_code == 0, result.output
            assert json.loads(result.stdout)["budget_bytes"] == budget


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # Equinox donates x
@pytest.mark.parametrize("command", ["doctor", "compare"])
@pytest.mark.parametrize("name", ["memplan", "equinox", "nnx"])
def test_studies_take_the_step_inside(command: str, name: str, workshop: Path) -> None:
    result = run(command, f"factories:make(name={name!r})", "--json", "-")
    assert result.exit_code == 0, result.output


KERAS = """
import keras, numpy
def make():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse", jit_compile=True)
    return model, (numpy.ones((32, 8), "float32"), numpy.ones((32, 4), "float32"))
def planned():
    import memplan
    model, batch = make()
    return memplan.keras.plan(model, budget="100MiB"), batch
"""


@pytest.mark.parametrize("name", ["make", "planned"])
def test_the_step_of_a_keras_model(name: str, workshop: Path) -> None:
    (workshop / f"keras_{name}.py").write_text(KERAS)
    result = run("inspect", f"keras_{name}:{name}", "--json", "-")
    assert result.exit_code == 0, result.output
    is_planned = json.loads(result.stdout)["budget_bytes"] == 100 << 20
    assert is_planned == (name == "planned")
    words = "--budget", "50MiB", "--json", "-"
    result = run("inspect", f"keras_{name}:{name}", *words)
    assert json.loads(result.stdout)["budget_bytes"] == 50 << 20


def test_asaved_plan_is_followed_unless_the_command_replaces_an_option() -> None:
    plan = memplan.jit(step, budget="480KiB", donate_argnums=0).plan(*ARGS).plan
    plain = plain_step(memplan.jit(step, plan=plan), ARGS)
    assert saved_plan(plain, None, StepCommandOptions()) is plan is not None
    assert saved_plan(plain, "1GiB", StepCommandOptions()) is None
    assert saved_plan(plain, None, StepCommandOptions(donate="0")) is None
