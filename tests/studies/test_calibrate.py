"""From measurements to a device that plans use, by the command and by `device=`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memplan
from memplan import api, pipeline
from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog, measured
from memplan.hardware.measured import Conditions, Measurement, Spec, Timing
from memplan.studies import calibrate
from memplan.xla.local import local_device
from memplan.xla.microbench import Patience, tasks
from tests.dense import step as train

QUICK = tuple(
    task for task in tasks() if task.name in (measured.MATRIX.format("float32"), measured.ELEMENTWISE, measured.LATENCY)
)
ONCE = Patience(runs=1, enough_s=0.0, most_nbytes=0)


def by_hand(base: catalog.Device, platform: str, kind: str, **rates: float) -> Spec:
    """A specification with these rates: `matrix`, `elementwise`, `memory`."""
    names = {
        "matrix": measured.MATRIX.format("float32"),
        "elementwise": measured.ELEMENTWISE,
        "memory": measured.MEMORY,
    }
    measurements = tuple(
        Measurement(names[name], "bytes/s" if name == "memory" else "FLOP/s", 1, (Timing("1", rate, 1.0, 1.0, 1.0),))
        for name, rate in rates.items()
    )
    found = Conditions(platform, kind, "a chip", (), (), "2026-01-02T03:04:05+00:00", measurements)
    return measured.calibrate(base, found)


def saved(found: Spec, folder: Path) -> str:
    path = folder / "device.json"
    found.save(path)
    return str(path)


ARGS = ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((4096, 64), jnp.float32))


def test_the_local_device_is_measured() -> None:
    stages: list[Any] = []
    found = calibrate.calibrate(lambda *stage: stages.append(stage), ONCE, QUICK)
    assert found.device.name == f"{local_device().name}-measured"
    assert found.device.rate("float32") == found.conditions.measurements[0].value
    assert found.device.memory_bandwidth == local_device().memory_bandwidth
    assert [name for name, _ in stages] == [f"measuring {task.name}" for task in QUICK]
    assert found.conditions.platform == jax.devices()[0].platform
    assert dict(found.conditions.versions)["jax"] == jax.__version__


def test_the_figures_stand_beside_what_is_assumed() -> None:
    found = calibrate.calibration(by_hand(local_device(), "cpu", "cpu", matrix=5e9, memory=7e9))
    rates = json.loads(found.to_json())["rates"]
    assert [rate["measured"] for rate in rates] == [5e9, 7e9]
    assert [rate["assumed"] for rate in rates] == [local_device().rate("float32"), local_device().memory_bandwidth]
    assert "5.00 GFLOP/s" in str(found) and "7.0 GB/s" in str(found)


def test_a_gpu_without_a_specification_can_be_measured_but_not_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> catalog.Device:
        raise UnknownDeviceError("never heard of it")

    monkeypatch.setattr(calibrate, "local_device", unknown)
    base = calibrate.base_device()
    assert base.target is None
    with pytest.raises(UnknownDeviceError, match="no specification by name"):
        pipeline.target_of(saved(by_hand(base, "gpu", "Unheard-of X1", matrix=1e12), tmp_path))


@pytest.mark.slow
def test_plans_use_the_rates(tmp_path: Path) -> None:
    seconds = []
    for slowness in (1, 10):
        rates = {"matrix": 1e9 / slowness, "elementwise": 1e9 / slowness, "memory": 1e9 / slowness}
        path = saved(by_hand(local_device(), "cpu", "cpu", **rates), tmp_path)
        report = memplan.jit(train, device=path, budget=6 * 2**20, donate_argnums=0).plan(*ARGS).report
        assert (report.device, report.status) == ("cpu-measured", "fits")
        assert report.planner == "kernels"
        seconds.append((report.predicted_step_s, report.lower_bound_s))
    (fast, least), (slow, most) = seconds
    assert slow == pytest.approx(10 * fast) and most == pytest.approx(10 * least)


@pytest.mark.slow
def test_a_step_planned_with_measured_rates_runs_here(tmp_path: Path) -> None:
    path = saved(by_hand(local_device(), "cpu", "cpu", matrix=1e9), tmp_path)
    weights, x = [0.1 * jnp.ones((64, 64))] * 6, jnp.ones((4096, 64))
    step = memplan.jit(train, device=path, budget=6 * 2**20)
    expected = jax.jit(train)(weights, x)
    for one, other in zip(jax.tree.leaves(step(weights, x)), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(one, other, rtol=1e-4)
    assert step.plan(weights, x).report.runs_on == jax.devices()[0].device_kind


def test_a_measured_cpu_is_the_local_backend(tmp_path: Path) -> None:
    found = by_hand(local_device(), "cpu", "cpu", matrix=1e9)
    target = pipeline.target_of(saved(found, tmp_path))
    assert not target.described and not target.is_gpu
    assert target.device == found.device


def test_a_measured_gpu_that_is_not_here_is_described(tmp_path: Path) -> None:
    found = by_hand(catalog.named("h200"), "gpu", "NVIDIA H200", matrix=4e14)
    target = pipeline.target_of(saved(found, tmp_path))
    assert target.described and target.is_gpu
    assert target.device.target == catalog.named("h200").target


@pytest.mark.parametrize("text", [None, "", "{", '{"format": 1}'])
def test_a_file_that_is_none_is_refused_at_once(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        memplan.jit(train, device=str(path))
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        api.compare(train, ARGS, device=str(path))
