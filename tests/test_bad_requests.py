"""Every door refuses what makes no sense with one error that says what it is and what to write instead."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import memplan
from memplan import InfeasibleBudgetError, MemplanError, PlanMismatchError, UnsupportedProgramError
from memplan.errors import BudgetError, DeletedArgumentError, TopologyError, UnknownDeviceError
from tests import test_api

X, Y = np.ones((32, 4), np.float32), np.ones((32, 1), np.float32)


def train(weights: Any, x: Any, y: Any) -> Any:
    def loss_of(weights: Any) -> Any:
        return ((jnp.tanh(x @ weights[0]) @ weights[1] - y) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, gradient: weight - gradient, weights, gradients), loss


def weights() -> list[jax.Array]:
    return [jnp.ones((4, 8)), jnp.ones((8, 1))]


def model() -> keras.Model:
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    network.compile("sgd", "mse")
    return network


@dataclass(frozen=True)
class Door:
    """A way into memplan."""

    open: Callable[..., Any]  # with options of `memplan.jit`
    step: Callable[..., Any]  # what `open` returned, x, y; runs one step

    def run(self, **options: Any) -> Any:
        return self.step(self.open(**options), X, Y)


DOORS = {
    "jit": Door(
        lambda **options: memplan.jit(train, **options), lambda step, x, y: step(weights(), x, y)
    ),
    "decorator": Door(
        lambda **options: memplan.jit(**options)(train), lambda step, x, y: step(weights(), x, y)
    ),
    "stages": Door(
        lambda **options: memplan.jit(train, **options),
        lambda step, x, y: step.lower(weights(), x, y).compile(),
    ),
    "equinox": Door(
        lambda **options: memplan.equinox.filter_jit(train, **options),
        lambda step, x, y: step(weights(), x, y),
    ),
    "nnx": Door(
        lambda **options: memplan.nnx.jit(train, **options),
        lambda step, x, y: step(weights(), x, y),
    ),
    "keras": Door(
        lambda **options: memplan.keras.plan(model(), **options),
        lambda planned, x, y: planned._model.train_on_batch(x, y),
    ),
}
OTHER = {name: door for name, door in DOORS.items() if name not in ("decorator", "stages")}

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras' own


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": "abc"}, BudgetError, "16GiB"),
        ({"budget": -1}, BudgetError, "negative"),
        ({"budget": "200%"}, BudgetError, "more than 100 %"),
        ({"budget": float("nan")}, BudgetError, "nan is not a budget"),
        ({"budget": "nan"}, BudgetError, "16GiB"),
        ({"budget": [1]}, BudgetError, "is a list"),
        ({"budget": "3 lightyears"}, BudgetError, "not a unit"),
        ({"host_budget": -1}, BudgetError, "host budget is negative"),
        ({"host_budget": "much"}, BudgetError, "host budget"),
        ({"device": "v9000"}, UnknownDeviceError, "Did you mean v100"),
        ({"device": "missing.json"}, UnknownDeviceError, "memplan calibrate"),
        ({"device": 3}, MemplanError, "device is 3; it is the name"),
        ({"planner": "clairvoyant"}, MemplanError, "'kernels'"),
        ({"planner": 7}, MemplanError, "is not a planner, which has a name and a method plan"),
        ({"plan": "plan.json"}, MemplanError, r"memplan\.Plan\.load"),
        ({"verify": "x"}, MemplanError, "one of 'compile', 'numbers', None"),
        ({"split": "x"}, MemplanError, "one of 'auto', False"),
        ({"topology": "banana"}, TopologyError, "Write a topology as"),
        ({"topology": "0x4"}, TopologyError, "at least 1"),
        ({"topology": float("nan")}, MemplanError, 'a shape such as "2x4"'),
        ({"between_hosts": "int8"}, MemplanError, "one of None, 'bfloat16', 'float16'"),
        ({"pin": "host"}, MemplanError, "pin is 'host'; it is a mapping"),
        ({"pin": {"x": "nowhere"}}, MemplanError, "one of 'device', 'host', 'recompute'"),
        (
            {"pin": {"x": "host"}, "planner": SimpleNamespace(name="own", plan=print)},
            MemplanError,
            "leave planner out",
        ),
        ({"compiler_options": "fast"}, TypeError, "a mapping from XLA's options"),
        (
            {"bugdet": "16GiB"},
            TypeError,
            "has no argument bugdet; its options are budget, host_budget",
        ),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_refused_at_once(
    door: str, options: Any, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        DOORS[door].open(**options)


@pytest.fixture(scope="module")
def plan_of_another() -> Any:
    return memplan.jit(test_api.train, budget="50KiB").plan(*test_api.SHAPES).plan


@pytest.mark.parametrize("door", OTHER)
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"budget": 0},
            InfeasibleBudgetError,
            r"no plan fits 0 B on cpu.*(?s:.*)a budget of \d+ bytes",
        ),
        (
            {"budget": "1 B", "split": False},
            InfeasibleBudgetError,
            r"No order of its kernels takes less than .*: arguments, outputs",
        ),
        ({"budget": "0%"}, InfeasibleBudgetError, "a smaller batch"),
        ({"pin": {"unknown": "host"}}, MemplanError, "no value of the step is named 'unknown'"),
        ({"pin": {1: "host"}}, MemplanError, "no value of the step is named 1"),
        (
            {"compiler_options": {"xla_nonsense": True}},
            MemplanError,
            "No such compile option: 'xla_nonsense'",
        ),
        (
            {"compiler_options": {"xla_cpu_enable_fast_math": "maybe"}},
            MemplanError,
            "not a valid bool value",
        ),
        ({"topology": "2x3x4x5"}, TopologyError, "a size for each of its axes"),
    ],
    ids=str,
)
def test_an_impossible_request_says_what_is_possible(
    door: str, options: Any, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        DOORS[door].run(**options)


@pytest.mark.parametrize("door", OTHER)
def test_a_plan_of_another_program_is_refused(door: str, plan_of_another: Any) -> None:
    with pytest.raises(PlanMismatchError, match="made for"):
        DOORS[door].run(plan=plan_of_another)
    with pytest.raises(MemplanError, match="plan and pin were both given"):
        DOORS[door].open(plan=plan_of_another, pin={"x": "host"})


# jax warns of it before it refuses it
@pytest.mark.filterwarnings("ignore:Python iterable type 'generator'")
@pytest.mark.parametrize("door", OTHER)
@pytest.mark.parametrize(
    "batch",
    [
        "words",
        ["a", "b"],
        (batch for batch in [X]),
        object(),
        np.array(["a", "b"]),
        np.array([object()]),
        X[:, :3],
        None,
    ],
    ids=[
        "text",
        "texts",
        "generator",
        "object",
        "words in an array",
        "objects in an array",
        "shape",
        "none",
    ],
)
def test_a_batch_that_is_none_is_refused_as_the_library_does(door: str, batch: Any) -> None:
    """By a TypeError or ValueError of jax or the library; the next step runs as if nothing had been."""
    planned = OTHER[door].open(budget="1GiB")
    with pytest.raises((TypeError, ValueError)):
        OTHER[door].step(planned, batch, Y)
    OTHER[door].step(planned, X, Y)


@pytest.mark.parametrize("door", ["jit", "equinox", "nnx"])
class TestCalls:
    def opened(self, door: str, **options: Any) -> Any:
        return OTHER[door].open(**options)

    def test_missing_and_unknown_arguments(self, door: str) -> None:
        step = self.opened(door)
        for ask in (
            lambda: step(weights()),
            lambda: step(weights(), X, Y, 1),
            lambda: step(weights(), X, Y, z=1),
        ):
            with pytest.raises(TypeError, match=r"argument|positional"):
                ask()

    def test_arrays_that_were_donated(self, door: str) -> None:
        step = self.opened(
            door, **({"donate": "all"} if door == "equinox" else {"donate_argnums": 0})
        )
        used = weights()
        arguments = used, X, Y
        step(*arguments)
        with pytest.raises(
            DeletedArgumentError, match=r"2 of the 4 arrays .* float32\[4, 8\].* were donated"
        ):
            step(*arguments)
        assert step.plan(weights(), X, Y).report.status == "untouched"

    def test_a_step_that_is_no_function(self, door: str) -> None:
        decorate = {
            "jit": memplan.jit,
            "equinox": memplan.equinox.filter_jit,
            "nnx": memplan.nnx.jit,
        }[door]
        for wrong in (3, "16GiB", []):
            with pytest.raises(TypeError, match=r"is no function|is not a callable object"):
                decorate(wrong)

    def test_other_structures_of_a_compiled_step(self, door: str) -> None:
        compiled = self.opened(door).plan(weights(), X, Y).compile()
        for wrong in ((weights()[:1], X, Y), (weights(), X[:3], Y), ([*weights(), X], X, Y)):
            with pytest.raises(TypeError, match=r"compiled with|types differ|does not match"):
                compiled(*wrong)

    def test_inside_grad(self, door: str) -> None:
        step = self.opened(door)
        with pytest.raises(UnsupportedProgramError, match="Decorate the outermost step"):
            jax.grad(lambda weights: step(weights, X, Y)[1])(weights())


def test_wrong_donations_are_the_librarys_own_errors() -> None:
    for wrong, said in (
        ({"donate_argnums": 9}, "donate_argnums"),
        ({"donate_argnames": "nope"}, "nope"),
    ):
        for jit in (memplan.jit, memplan.nnx.jit):
            with pytest.raises(ValueError, match=said):
                jit(train, **wrong)
    with pytest.raises(ValueError, match="'all-except-first'"):
        memplan.equinox.filter_jit(train, donate="some")
    for option in ("donate_argnums", "static_argnums", "host_state"):
        with pytest.raises(TypeError, match=f"has no argument {option}"):
            memplan.equinox.filter_jit(train, **{option: 0})


def test_the_same_array_twice() -> None:
    step, x = memplan.jit(lambda state, x: (state + 1, x * 2), donate_argnums=0), jnp.ones(3)
    with pytest.raises(DeletedArgumentError, match="the same array is in two arguments"):
        step(x, x)


@pytest.mark.parametrize("wrong", ["state", 1.5, [None], -1, 9])
def test_state_on_the_host_is_an_argument(wrong: Any) -> None:
    with pytest.raises(
        MemplanError, match=r"position of an argument|cannot be kept in host memory"
    ):
        memplan.jit(train, host_state=wrong).plan(weights(), X, Y)


def test_values_that_are_no_arrays_get_advice() -> None:
    step = memplan.jit(train)
    with pytest.raises(TypeError) as caught:
        step(weights(), jax.ShapeDtypeStruct((32, 4), jnp.float32), Y)
    assert "method plan" in "".join(caught.value.__notes__)
    with pytest.raises(OverflowError, match="argument path is x"):
        step(weights(), 10**30, Y)
    with pytest.raises(TypeError, match="<class 'set'>"):
        step(weights(), {1}, Y)
    with pytest.raises(TypeError, match=r"static argument .*unhashable type: 'list'"):
        memplan.jit(train, static_argnums=0)(weights(), X, Y)
