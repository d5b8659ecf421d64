"""The committed results belong together, and the README says what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.budgets.cases import mlp_step
from experiments.calibration import run
from memplan.hardware import measured
from memplan.hardware.measured import Measurement, Timing

FOLDER = Path(run.__file__).parent
FOUND = json.loads((FOLDER / "results" / "steps.json").read_text())
DEVICE = measured.load(FOLDER / "results" / "device.json")


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


def test_a_step_is_predicted_as_it_is_and_planned() -> None:
    case = run.Case("a product", lambda: mlp_step(2, 64, 256, concrete=True))
    plain, planned = case.rows({"plain": [2.0, 1.0], "planned": [3.0]}, {"measured": DEVICE.device})
    assert (plain["way"], plain["best_s"], plain["median_s"]) == ("plain", 1.0, 1.5)
    assert planned["device_bytes"] < plain["device_bytes"]
    assert planned["predicted_s"]["measured"] >= plain["predicted_s"]["measured"] > 0


def test_of_two_calibrations_the_better_of_each_rate_counts() -> None:
    def with_rate(name: str, unit: str, seconds: float) -> measured.Spec:
        timing = Timing("1", 6.0, seconds, seconds, seconds)
        return replace(
            DEVICE, conditions=replace(DEVICE.conditions, measurements=(Measurement(name, unit, 1, (timing,)),))
        )

    for name, unit in ((measured.MEMORY, "bytes/s"), (measured.LATENCY, "s")):
        best = run.better(with_rate(name, unit, 3.0), with_rate(name, unit, 2.0))
        assert best.conditions.measurements[0].best.best_s == 2.0
