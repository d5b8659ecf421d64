"""The committed results belong together, and the README says what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments.calibration import run
from memplan.planning import spec
from memplan.planning.spec import Measurement, Timing
from memplan.program.extract import extract
from memplan.program.trace import trace

FOLDER = Path(run.__file__).parent
FOUND = json.loads((FOLDER / "results" / "steps.json").read_text())
DEVICE = spec.load(FOLDER / "results" / "device.json")


def test_readme_shows_the_results() -> None:
    assert run.table(FOUND) in (FOLDER / "README.md").read_text()


def test_the_device_is_the_one_that_predicted() -> None:
    assert FOUND["hardware"] == DEVICE.conditions.hardware
    assert FOUND["versions"] == dict(DEVICE.conditions.versions)
    assert {row["step"] for row in FOUND["steps"]} == set(run.STEPS)
    assert all(run.factor(FOUND["steps"], kind) == pytest.approx(value) for kind, value in FOUND["factor"].items())


def test_a_prediction_twice_too_long_is_as_far_off_as_one_twice_too_short() -> None:
    rows = [{"predicted_s": {"x": seconds}, "best_s": 1.0} for seconds in (2.0, 0.5)]
    assert run.factor(rows, "x") == pytest.approx(2.0)


def test_convolutions_get_a_rate_of_their_own_and_nothing_else_does() -> None:
    def step(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.conv(x, w, (1, 1), "SAME").reshape(2, -1) @ v

    shapes = [(2, 3, 8, 8), (4, 3, 3, 3), (256, 5)]
    graph = extract(trace(step, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), {}, {}))
    named = run.named_convolutions(graph)
    classes = {op.name: op.flops_dtype for op in named.ops if op.flops_dtype}
    assert classes == {"conv_general_dilated": "2D float32", "dot_general": "float32"}
    device = run.with_convolutions(DEVICE)
    assert device.rate("2D float32") == pytest.approx(run.convolution_rate(DEVICE, 2))
    assert device.rate("float32") == DEVICE.device.rate("float32")


def test_of_two_calibrations_the_better_of_each_rate_counts() -> None:
    def with_rate(name: str, unit: str, seconds: float) -> spec.Spec:
        timing = Timing("1", 6.0, seconds, seconds, seconds)
        return replace(
            DEVICE, conditions=replace(DEVICE.conditions, measurements=(Measurement(name, unit, 1, (timing,)),))
        )

    for name, unit in ((spec.MEMORY, "bytes/s"), (spec.LATENCY, "s")):
        best = run.better(with_rate(name, unit, 3.0), with_rate(name, unit, 2.0))
        assert best.conditions.measurements[0].best.best_s == 2.0
