from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SAME = 3e-5  # what rounding does to these steps, three times over


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> Any:
    script = Path(__file__).with_name("eight_devices.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = pytest.mark.slow


def test_eight_devices_train_as_one_does(found: Any) -> None:
    assert max(found["same"].values()) < SAME, found["same"]


def test_a_divided_step_is_planned_as_one_device_runs_it(found: Any) -> None:
    planned = found["planned"]
    assert planned["planner"] == "kernels"
    assert 0 <= planned["baseline"] <= 1024  # tables of pointers, which XLA:CPU packs more tightly than is counted
    assert planned["within"] <= 1
    assert planned["off"] < SAME


@pytest.mark.parametrize("name", ["dropped", "accumulated", "scaled", "layered", "per example", "while", "sorted"])
def test_steps_of_all_kinds_are_those_of_one_device(found: Any, name: str) -> None:
    assert found["function"][name]["off"] < SAME


def test_gradients_of_all_microbatches_are_summed_once(found: Any) -> None:
    assert found["function"]["accumulated"]["sums"] == [2]


def test_what_is_made_per_example_stays_divided(found: Any) -> None:
    assert found["function"]["per example"]["split"]
    assert found["function"]["while"]["split"]


def test_what_cannot_be_divided_is_gathered_and_told_with_its_line(found: Any) -> None:
    (told,) = found["function"]["sorted"]["told"]
    assert "sort at" in told and "eight_devices.py" in told
    others = {name: one["told"] for name, one in found["function"].items() if name != "sorted"}
    assert not any(others.values()), others


def test_statistics_of_each_devices_own_are_those_of_the_customary_way(found: Any) -> None:
    own = found["own statistics"]
    assert own["off"] < SAME < own["from global"]
    assert own["sums"] <= 6


@pytest.mark.parametrize("how", ["placed", "not placed", "planned"])
def test_a_mesh_may_be_the_one_that_jax_makes(found: Any, how: str) -> None:
    assert found["over typed mesh"][how] < SAME


def test_compressed_sums_remember_what_they_left_out(found: Any) -> None:
    compressed = found["compressed"]
    assert compressed["loss"] == pytest.approx(1, abs=1e-4)
    assert any("bfloat16" in how for how in compressed["how"])
    assert "place(state, batch)" in compressed["refused"]


def test_each_device_keeps_its_part_of_divided_state(found: Any) -> None:
    assert found["split state"]["share"] == pytest.approx(1 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("indivisible", "global batch of 6"),
        ("too large", "needs 16 devices; there are 8"),
        ("axes", "the mesh has a"),
        ("twice", "decomposed already"),
        ("wire", "bfloat16"),
        ("both", "either split_state or compress"),
        ("statistics", "'global' or 'device'"),
    ],
)
def test_bad_input_is_told(found: Any, name: str, told: str) -> None:
    assert told in found["refused"][name]
