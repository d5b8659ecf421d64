"""Machines as tables and JSON: every figure is the one that plans use, under the documented names."""

from __future__ import annotations

import dataclasses
import json

from memplan.hardware.catalog import DEVICES, LINKS
from memplan.hardware.measured import Conditions, Measurement, Spec, Timing
from memplan.hardware.topology import TOPOLOGIES, Axis
from memplan.report.hardware import Calibration, Devices, Topologies


def test_devices() -> None:
    found = Devices(tuple(DEVICES.values()), tuple(LINKS))
    document = json.loads(found.to_json())
    assert document["schema"] == "memplan.devices/1" and document["links"] == list(LINKS)
    v100 = next(row for row in document["devices"] if row["name"] == "v100")
    assert v100.keys() == {
        "name", "description", "memory_bytes", "memory_bandwidth", "float32_flops", "bfloat16_flops", "link",
        "link_bandwidth", "sources",
    }  # fmt: skip
    assert (v100["float32_flops"], v100["link"]) == (15.7e12, "pcie3x16")
    assert v100["link_bandwidth"] == DEVICES["v100"].link.bandwidth
    assert all(f"{device.memory_bandwidth / 1e9:,.0f}" in str(found) for device in DEVICES.values())


def test_topologies() -> None:
    document = json.loads(Topologies(tuple(TOPOLOGIES.values())).to_json())
    assert document["schema"] == "memplan.topologies/1"
    for row, topology in zip(document["topologies"], TOPOLOGIES.values(), strict=True):
        assert row.keys() == {"name", "description", "levels", "sources"}
        assert tuple(Axis(**level) for level in row["levels"]) == topology.axes


def test_calibration() -> None:
    timings = Timing("small", 1e9, 1.0, 1.5, 2.0), Timing("large", 4e9, 1.0, 1.1, 2.0)
    rates = Measurement("matrix", "FLOP/s", 3, timings), Measurement("latency", "s", 3, timings[:1], "from Python")
    conditions = Conditions("cpu", "cpu", "a chip", (0.5, 1.0), (("jax", "0.11.2"),), "2026-01-02", rates)
    found = Calibration(Spec(dataclasses.replace(DEVICES["v100"], name="mine"), conditions), {"matrix": 2e9})
    document = json.loads(found.to_json())
    assert document.pop("rates") == [
        {"name": "matrix", "unit": "FLOP/s", "measured": 4e9, "assumed": 2e9, "spread": 1.1 / 1.0 - 1,
         "size": "large", "note": ""},
        {"name": "latency", "unit": "s", "measured": 1.0, "assumed": None, "spread": 0.5, "size": "small",
         "note": "from Python"},
    ]  # fmt: skip
    assert document == {
        "schema": "memplan.calibration/1", "device": "mine", "hardware": "a chip", "date": "2026-01-02",
        "load": [0.5, 1.0], "versions": {"jax": "0.11.2"},
    }  # fmt: skip
    assert "4.00 GFLOP/s" in str(found) and "10 %" in str(found) and "0.5, 1.0" in str(found)
