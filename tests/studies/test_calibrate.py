"""From measurements to a device that plans use, by the command and by `device=`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import memplan
from memplan import api, pipeline
from memplan.cli import app as cli
from memplan.cli import machines
from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog, measured
from memplan.hardware.measured import Conditions, Measurement, Spec, Timing
from memplan.report.calibration import Calibration
from memplan.studies import calibrate
from memplan.xla import local
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
    return measured.calibrated(base, found)


def saved(found: Spec, folder: Path) -> str:
    path = folder / "device.json"
    found.save(path)
    return str(path)


ARGS = ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((4096, 64), jnp.float32))


def test_the_local_device_is_measured() -> None:
    told: list[Any] = []
    found = calibrate.calibrate(lambda *stage: told.append(stage), ONCE, QUICK)
    assert found.device.name == f"{local_device().name}-measured"
    assert found.device.rate("float32") == found.conditions.measurements[0].value
    assert found.device.memory_bandwidth == local_device().memory_bandwidth
    assert [name for name, _ in told] == [f"measuring {task.name}" for task in QUICK]
    assert found.conditions.platform == jax.devices()[0].platform
    assert dict(found.conditions.versions)["jax"] == jax.__version__


def test_the_figures_stand_beside_what_is_assumed() -> None:
    told = calibrate.told(by_hand(local_device(), "cpu", "cpu", matrix=5e9, memory=7e9))
    assert [rate.assumed for rate in told.rates] == [local_device().rate("float32"), local_device().memory_bandwidth]
    assert Calibration.from_json(told.to_json()) == told
    assert "5.00 GFLOP/s" in str(told) and "7.0 GB/s" in str(told)


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


@dataclasses.dataclass(frozen=True)
class Card:
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def test_a_measured_gpu_that_is_here_is_the_local_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.jax, "local_devices", lambda: [Card()])
    assert local.is_here(catalog.named("h200"), "gpu", "NVIDIA H200")
    assert not local.is_here(catalog.named("v100"), "gpu", "Tesla V100-SXM2-16GB")
    with pytest.raises(UnknownDeviceError, match="JAX_PLATFORMS=cpu"):
        local.is_here(catalog.local_cpu(2, 2**30), "cpu", "cpu")


@pytest.mark.parametrize("text", [None, "", "{", '{"format": 1}'])
def test_a_file_that_is_none_is_refused_at_once(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        memplan.jit(train, device=str(path))
    with pytest.raises(UnknownDeviceError, match=r"device\.json"):
        api.compare(train, ARGS, device=str(path))


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(notify: Any) -> Spec:
        notify("measuring", 0.5)
        return by_hand(local_device(), "cpu", "cpu", matrix=5e9)

    monkeypatch.setattr(machines, "calibrate_device", measure)


@pytest.mark.usefixtures("quickly")
def test_the_command_writes_a_device_and_figures(tmp_path: Path) -> None:
    device, figures = tmp_path / "device.json", tmp_path / "figures.json"
    result = CliRunner().invoke(cli.app, ["calibrate", "--out", str(device), "--json", str(figures)])
    assert result.exit_code == 0, result.output
    assert measured.load(device).device.rate("float32") == 5e9
    assert json.loads(figures.read_text())["schema"] == "memplan.calibration/1"
    assert "matrix product float32" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device.json", "figures.json"]


@pytest.mark.usefixtures("quickly")
def test_the_command_without_files_prints() -> None:
    assert "5.00 GFLOP/s" in CliRunner().invoke(cli.app, ["calibrate"]).stdout
    assert json.loads(CliRunner().invoke(cli.app, ["calibrate", "--json", "-"]).stdout)["device"] == "cpu-measured"


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    "words",
    [["--out", "plain"], ["--out", "no/such/folder/d.json"], ["--out", "same.json", "--json", "same.json"]],
)
def test_the_command_refuses_what_it_could_not_write(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli.app, ["calibrate", *words]).exit_code == 2
    assert not list(tmp_path.iterdir())
