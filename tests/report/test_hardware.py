"""Machines as tables and JSON: the figures of plans, under their documented names."""

import dataclasses
import json

from memplan.hardware.catalog import DEVICES, LINKS
from memplan.hardware.topology import TOPOLOGIES, Axis
from memplan.report.hardware import Calibration, Devices, Topologies


def test_devices() -> None:
    devices = Devices(tuple(DEVICES.values()), tuple(LINKS))
    document = json.loads(devices.to_json())
    assert document["schema"] == "memplan.devices/1" and document["links"] == list(LINKS)
    v100 = next(row for row in document["devices"] if row["name"] == "v100")
    assert v100.keys() == {
        "name", "description", "memory_bytes", "memory_bandwidth", "float32_flops", "bfloat16_flops", "link",
        "link_bandwidth", "sources",
    }  # fmt: skip
    assert (v100["float32_flops"], v100["link"]) == (15.7e12, "pcie3x16")
    assert v100["link_bandwidth"] == DEVICES["v100"].link.bandwidth
    assert all(
        f"{device.memory_bandwidth / 1e9:,.0f}" in str(devices) for device in DEVICES.values()
    )


def test_topologies() -> None:
    document = json.loads(Topologies(tuple(TOPOLOGIES.values())).to_json())
    assert document["schema"] == "memplan.topologies/1"
    for row, topology in zip(document["topologies"], TOPOLOGIES.values(), strict=True):
        assert row.keys() == {"name", "description", "levels", "sources"}
        assert tuple(Axis(**level) for level in row["levels"]) == topology.axes


def test_calibration() -> None:
    device = dataclasses.replace(DEVICES["v100"], name="mine", sources=("Measured on a day",))
    assert device.efficiency.error == 0.4
    rates = {"matrix, FLOP/s": 4e9, "memory, bytes/s": 7e9, "latency, s": 2e-6}
    calibration = Calibration(device, rates, {name: 2 * rate for name, rate in rates.items()})
    document = json.loads(calibration.to_json())
    assert document.pop("assumed") == {
        name: 2 * rate for name, rate in document["measured"].items()
    }
    assert document == {
        "schema": "memplan.calibration/2", "device": "mine", "sources": ["Measured on a day"], "measured": rates,
        "seconds_error": 0.4,
    }  # fmt: skip
    rates_text = "4.00 GFLOP/s", "8.00 GFLOP/s", "7.0 GB/s", "14.0 GB/s", "2.00 us"
    assert all(
        text in str(calibration) for text in (*rates_text, "Measured on a day", "at most 40%")
    )
