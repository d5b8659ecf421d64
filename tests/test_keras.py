"""`memplan.keras.plan`: Keras trains the same model, to the bit, within a budget, and nothing else changes."""

import os
import subprocess
import sys
from typing import Any

import jax
import keras
import numpy as np
import pytest

import memplan
from memplan import InfeasibleBudgetError, MemplanError, UnsupportedProgramError

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(768, 4)).astype("float32")
Y = np.sin(X).sum(1, keepdims=True)
LIMIT = 148 << 10  # a step of 256 samples takes 160 to 180 KiB as it is


def model(draws: bool = False, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    first = [keras.layers.Dropout(0.2), keras.layers.BatchNormalization()] if draws else []
    hidden = [keras.layers.Dense(32, activation="tanh") for _ in range(3)]
    network = keras.Sequential([keras.Input((4,)), *first, *hidden, keras.layers.Dense(1)])
    network.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss="mse", metrics=["mae"], **options
    )
    return network


def weights(network: keras.Model) -> list[np.ndarray]:
    return [np.asarray(variable) for variable in (*network.variables, *network.optimizer.variables)]


def fit(network: keras.Model, samples: int = 400, **options: Any) -> Any:
    keras.utils.set_random_seed(1)  # of the order of samples
    data = X[:samples], Y[:samples]
    return network.fit(*data, batch_size=256, verbose=0, **options).history


def same(first: keras.Model, second: keras.Model) -> bool:
    return all(map(np.array_equal, weights(first), weights(second)))


def test_fit_is_keras_own_to_the_bit_within_the_budget() -> None:
    """With dropout, batch statistics, metrics, validation and a last batch of another size."""
    plain, planned = model(draws=True), model(draws=True)
    report = memplan.keras.plan(planned, budget=LIMIT)
    options = {"epochs": 2, "validation_data": (X[:50], Y[:50])}
    assert fit(planned, **options) == fit(plain, **options) and same(planned, plain)
    assert report.report.compiled_peak_bytes <= LIMIT < report.report.baseline_peak_bytes
    assert report.report.planner == "kernels" and len(report._step._planned) == 2


def test_several_steps_in_one_execution_and_single_batches() -> None:
    plain, planned = model(steps_per_execution=3), model(steps_per_execution=3)
    report = memplan.keras.plan(planned, budget=LIMIT)
    assert fit(planned, 768, epochs=2) == fit(plain, 768, epochs=2) and same(planned, plain)
    assert report.report.compiled_peak_bytes <= LIMIT and report.report.planner == "kernels"
    for each in (plain, planned):
        each.compile("sgd", "mse")
    batch = X[:8], Y[:8], np.linspace(0, 1, 8)
    assert planned.train_on_batch(*batch) == plain.train_on_batch(*batch) and same(planned, plain)


def test_a_plan_comes_before_training_and_for_a_model_that_is_not_built() -> None:
    network = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
    network.compile("sgd", "mse")
    planned = memplan.keras.plan(network, budget="1GiB")
    with pytest.raises(MemplanError, match="nothing was planned yet"):
        _ = planned.report
    shapes = [jax.ShapeDtypeStruct((64, width), "float32") for width in (4, 1)]
    assert planned.plan(*shapes).report.status == "untouched" and network.built
    before = weights(network)
    assert planned.report.budget_bytes == 1 << 30
    network.fit(X[:64], Y[:64], batch_size=64, verbose=0)
    assert len(planned._step._planned) == 1 and not all(
        map(np.array_equal, before, weights(network))
    )


def test_a_refused_budget_leaves_the_model_as_it_was() -> None:
    network, twin = model(), model()
    memplan.keras.plan(network, budget=1, split=False)
    with pytest.raises(InfeasibleBudgetError, match="a budget of") as caught:
        network.fit(X, Y, batch_size=256, verbose=0)
    assert same(network, twin)
    planned = memplan.keras.plan(network, budget=caught.value.smallest_bytes)  # replaces the first
    network.fit(X, Y, batch_size=256, verbose=0)
    assert planned.report.budget_bytes == caught.value.smallest_bytes and not same(network, twin)


# Keras' own, where it copies an optimizer
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_one_model_is_planned_and_stays_so_when_compiled_again() -> None:
    network, twin = model(), model()
    planned = memplan.keras.plan(network)
    np.testing.assert_array_equal(network.predict(X[:8], verbose=0), twin.predict(X[:8], verbose=0))
    network.compile("sgd", "mse")
    network.train_on_batch(X[:8], Y[:8])
    assert planned.report.status == "untouched"
    first = planned._step
    network.compile("sgd", "mae")
    network.train_on_batch(X[:8], Y[:8])
    assert planned._step is not first and planned._step._planned
    copy = keras.models.clone_model(network)
    for each in (twin, copy):
        assert each._make_function.__func__ is keras.Model._make_function


def test_models_without_a_compiled_step_are_refused() -> None:
    with pytest.raises(MemplanError, match=r"not compiled. Call model.compile"):
        memplan.keras.plan(keras.Sequential([keras.layers.Dense(1)]))
    for options in ({"run_eagerly": True}, {"jit_compile": False}):
        with pytest.raises(MemplanError, match="jit_compile=True"):
            memplan.keras.plan(model(**options))
    network = model()
    memplan.keras.plan(network)
    network.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(MemplanError, match="jit_compile=True"):
        network.train_on_batch(X[:8], Y[:8])
    network.evaluate(X[:8], Y[:8], verbose=0)
    for wrong in (keras.layers.Dense(1), 3, None):
        with pytest.raises(TypeError, match=r"takes a keras\.Model"):
            memplan.keras.plan(wrong)  # type: ignore[arg-type]


def test_a_models_own_step_is_planned_but_no_train_function_of_its_own() -> None:
    class Halved(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, state: Any, data: Any) -> Any:
            logs, state = super().train_step(state, data)
            return {name: value / 2 for name, value in logs.items()}, state

    class Own(Halved):
        def make_train_function(self, force: bool = False) -> Any:
            return super().make_train_function(force)

    network = Halved()
    network.compile("sgd", "mse")
    planned = memplan.keras.plan(network, budget="1GiB")
    # before the update, as the first step's
    whole = network.test_on_batch(X, Y, return_dict=True)["loss"]
    assert network.train_on_batch(X, Y, return_dict=True)["loss"] == pytest.approx(whole / 2)
    assert planned.report.status == "untouched"
    own = Own()
    own.compile("sgd", "mse")
    with pytest.raises(UnsupportedProgramError, match="Own makes its own train function"):
        memplan.keras.plan(own)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(keras.backend, "backend", lambda: "torch")
        with pytest.raises(MemplanError, match="Keras runs on torch, and memplan plans on jax"):
            memplan.keras.plan(model())
    with monkeypatch.context() as patched:
        patched.setattr(keras.config, "is_nnx_enabled", lambda: True)
        with pytest.raises(MemplanError, match="KERAS_NNX_ENABLED"):
            memplan.keras.plan(model())


def test_without_its_backend_keras_is_not_started_and_memplan_is() -> None:
    script = """
import sys, memplan, memplan.api
assert not {"keras", "equinox"} & {*sys.modules}
try:
    memplan.keras
except ImportError as error:
    print(error)
sys.modules["equinox"] = sys.modules["keras"] = None  # as if they were not installed
for name in ("equinox", "keras"):
    try:
        getattr(memplan, name)
    except ImportError as error:
        print(error)
"""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "JAX_PLATFORMS": "cpu"}
    command, options = (
        [sys.executable, "-c", script],
        {"capture_output": True, "text": True, "check": True},
    )
    process = subprocess.run(command, env=environment, **options)
    backend, equinox_missing, keras_missing = process.stdout.splitlines()
    assert "'tensorflow'" in backend and "set KERAS_BACKEND=jax" in backend
    assert (
        "pip install 'memplan[equinox]'" in equinox_missing
        and "pip install 'memplan[keras]'" in keras_missing
    )


@pytest.mark.gpu_aot
def test_it_plans_for_a_gpu_that_is_absent() -> None:
    planned = memplan.keras.plan(model(), device="v100", budget="80%")
    assert planned.plan(X[:256], Y[:256]).report.device == "v100"
