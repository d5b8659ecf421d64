"""Commands about machines."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import machines
from memplan.hardware import measured
from memplan.hardware.efficiency import PRODUCT
from memplan.hardware.measured import MeasuredDevice
from memplan.hardware.topology import TOPOLOGIES
from memplan.studies.calibrate import Measurements, with_measurements
from memplan.studies.fit import Timing
from memplan.xla.kernel_cost import KernelCost
from memplan.xla.local import local_device
from tests.cli.command import message, run


def test_devices_are_listed_with_their_links() -> None:
    result = run("devices")
    assert result.exit_code == 0 and "v100" in result.stdout and "nvlink-c2c" in result.stdout
    listed = json.loads(run("devices", "--json", "-").stdout)["devices"]
    by_name = {device["name"]: device for device in listed}
    assert by_name["v100"]["memory_bytes"] > 15 * 2**30
    assert by_name["v100"]["float32_flops"] > 1e12


@pytest.fixture(autouse=True)
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(notify: Any) -> MeasuredDevice:
        notify("measuring", 0.5)
        product = Timing("product", (KernelCost(0, 0, 0, 5e9, "float32", PRODUCT),), 1.0)
        device = with_measurements(local_device(), Measurements({}, (product,)), "cpu")
        return MeasuredDevice(device, "cpu", "cpu")

    monkeypatch.setattr(machines, "calibrate_device", calibrate)


def test_calibrate_writes_a_device_and_figures(workshop: Path) -> None:
    before = set(workshop.iterdir())
    result = run("calibrate", "--out", "device.json", "--json", "figures.json")
    assert result.exit_code == 0, result.output
    assert measured.load("device.json").device.rate("float32") == 5e9
    assert json.loads(Path("figures.json").read_text())["schema"] == "memplan.calibration/2"
    assert "matrix product float32" in result.stdout
    written = {path.name for path in set(workshop.iterdir()) - before}
    assert written == {"device.json", "figures.json"}
    assert "5.00 GFLOP/s" in run("calibrate").stdout
    assert json.loads(run("calibrate", "--json", "-").stdout)["device"] == "cpu-measured"


def test_calibrate_keeps_the_seconds_of_a_step(workshop: Path) -> None:
    (workshop / "small.py").write_text(
        "import jax.numpy as jnp\n"
        "def make():\n"
        "    return lambda x: jnp.sort(x @ x), (jnp.ones((8, 8)),)\n"
    )
    result = run("calibrate", "small:make", "--out", "device.json")
    assert result.exit_code == 0, result.output
    device = measured.load("device.json").device
    assert device.kernels and all(seconds > 0 for seconds in device.kernels.values())
    assert f"Seconds of {len(device.kernels)} different kernels" in result.stdout
    assert "small" in message(run("calibrate", "small:none"), 2)


@pytest.mark.parametrize(
    "words", ["--out plain", "--out no/such/folder/d.json", "--out same.json --json same.json"]
)
def test_calibrate_refuses_files_that_it_cannot_write(words: str, workshop: Path) -> None:
    before = set(workshop.iterdir())
    assert run("calibrate", *words.split()).exit_code == 2
    assert set(workshop.iterdir()) == before


def test_topologies_are_listed() -> None:
    listed = json.loads(run("topology", "--json", "-").stdout)["topologies"]
    assert [topology["name"] for topology in listed] == list(TOPOLOGIES)
    assert [level["size"] for level in listed[0]["levels"]] == list(
        TOPOLOGIES["ddl"].sizes.values()
    )
    assert all(name in run("topology").stdout for name in TOPOLOGIES)
    assert "--measure" in message(run("topology", "--out", "t.json"), 2)
