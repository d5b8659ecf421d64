"""A measured device comes back from its file as it was, and no damaged file passes for one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog, measured
from memplan.hardware.measured import Conditions, Measurement, Spec, Timing
from tests.hardware.documents import edited

BASE = catalog.local_cpu(4, 8 * 2**30)


def rate(name: str, value: float, unit: str = "FLOP/s") -> Measurement:
    """Two sizes of which the second runs at `value`; a latency takes `value` seconds."""
    if unit == "s":
        return Measurement(name, unit, 3, (Timing("small", 1.0, value, 2 * value, 3 * value),))
    slow, fast = Timing("8", value, 2.0, 2.0, 2.0), Timing("16", 2 * value, 2.0, 3.0, 4.0)
    return Measurement(name, unit, 3, (slow, fast), "by hand")


MEASUREMENTS = (
    rate(measured.MATRIX.format("float32"), 128e9),
    rate(measured.MATRIX.format("bfloat16"), 30e9),
    rate("convolution 2D float32", 7e9),
    rate(measured.ELEMENTWISE, 40e9),
    rate(measured.MEMORY, 50e9, "bytes/s"),
    rate(measured.TO_HOST, 11e9, "bytes/s"),
    rate(measured.TO_DEVICE, 10e9, "bytes/s"),
    rate(measured.LATENCY, 3e-6, "s"),
)


def conditions(platform: str = "cpu", measurements: tuple[Measurement, ...] = MEASUREMENTS) -> Conditions:
    kind = "cpu" if platform == "cpu" else "NVIDIA H200"
    versions = (("jax", "0.10.2"),)
    return Conditions(
        platform, kind, "a chip, 4 cores", (0.0, 1.5), versions, "2026-01-02T03:04:05+00:00", measurements
    )


CPU = measured.calibrate(BASE, conditions())
GPU = measured.calibrate(catalog.named("h200"), conditions("gpu"))


def test_the_best_run_at_the_best_size_is_the_rate() -> None:
    found = rate("x", 5.0)
    assert (found.value, found.best.size, found.spread) == (5.0, "16", 0.5)
    assert rate("x", 2.0, "s").value == 2.0


def test_measured_rates_take_the_place_of_assumed_ones() -> None:
    device = CPU.device
    assert (device.rate("float32"), device.rate("bfloat16")) == (128e9, 30e9)
    assert (device.vector_flops, device.memory_bandwidth) == (40e9, 50e9)
    assert (device.link.bandwidth, device.link.latency_s) == (10e9, 3e-6)
    assert "host memory being device memory" in device.link.source
    assert (device.name, device.memory_bytes, device.target) == ("cpu-measured", BASE.memory_bytes, None)


def test_what_was_not_measured_keeps_its_ratio_and_is_named() -> None:
    ratio = 128e9 / BASE.rate("float32")
    assert CPU.device.rate("float64") == BASE.rate("float64") * ratio
    assert any("float16, float64, int8" in source for source in CPU.device.sources)


def test_a_gpu_keeps_what_it_is_compiled_for() -> None:
    assert GPU.device.target == catalog.named("h200").target
    assert GPU.device.name == "h200-measured"


def test_nothing_measured_is_nothing_changed() -> None:
    device = measured.calibrate(BASE, conditions(measurements=())).device
    kept = dataclasses.replace(device, name=BASE.name, description=BASE.description, sources=BASE.sources)
    assert kept == BASE and kept.flops == BASE.flops


@pytest.mark.parametrize("found", [CPU, GPU], ids=["cpu", "gpu"])
def test_saved_and_loaded_it_is_the_same(found: Spec, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    found.save(path)
    again = measured.load(path)
    assert again == found and again.device.flops == found.device.flops
    assert hash(again.device) == hash(found.device)
    assert [entry.name for entry in tmp_path.iterdir()] == ["device.json"]


def test_its_file_has_the_fields_of_a_device() -> None:
    document = json.loads(GPU.to_json())
    assert {field.name for field in dataclasses.fields(catalog.Device)} | {"conditions", "format"} == set(document)
    assert document["conditions"]["measurements"][0]["timings"][1]["size"] == "16"


def test_truncated_anywhere_it_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "device.json", CPU.to_json()
    for length in range(0, len(text) - 1, 97):
        path.write_text(text[:length])
        with pytest.raises(UnknownDeviceError, match=r"device\.json.*(not a whole|calibrate)"):
            measured.load(path)


def changed(where: str, value: Any) -> str:
    return edited(CPU.to_json(), where, value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "no entry 'format'"),
        ("3", "no entry 'format'"),
        ("null", "no entry 'format'"),
        ("[" * 100_000, "not a whole"),
        (changed("format", 7), "its format is 7"),
        (changed("memory_bandwidth", None), "no entry 'memory_bandwidth'"),
        (changed("link.latency_s", None), "no entry 'link.latency_s'"),
        (changed("target", [1]), "its 'target'"),
        (changed("conditions", None), "its 'conditions'"),
        (changed("conditions.date", None), "no entry 'conditions.date'"),
        (changed("name", 5), "its 'name' is 5, not text"),
        (changed("memory_bytes", 1.5), "its 'memory_bytes' is 1.5, not a whole number"),
        (changed("memory_bytes", True), "its 'memory_bytes'"),
        (changed("memory_bandwidth", "fast"), "its 'memory_bandwidth' is 'fast', not a number"),
        (changed("memory_bandwidth", 0), "which no device has"),
        (changed("vector_flops", float("nan")), "its 'vector_flops' is nan"),
        (changed("vector_flops", float("inf")), "its 'vector_flops' is inf"),
        (changed("vector_flops", 10**400), "not a whole"),
        (changed("flops", {}), "no entry 'float32'"),
        (changed("flops.float32", -1.0), "its 'flops.float32' is -1.0"),
        (changed("conditions.versions", [["jax"]]), r"conditions\.versions\[0\]"),
        (changed("conditions.measurements.0.timings", []), "no timings"),
    ],
)
def test_a_damaged_file_is_refused_and_says_where(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(UnknownDeviceError, match=told) as caught:
        measured.load(path)
    assert "memplan calibrate --out" in str(caught.value)


def test_what_cannot_be_read_is_an_unknown_device(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UnknownDeviceError, match="cannot be read"):
            measured.load(path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnknownDeviceError, match="not a whole"):
        measured.load(tmp_path / "bytes.json")


def test_files_and_names_are_told_apart() -> None:
    assert all(map(measured.is_path, ("a.json", "A.JSON", "./device", "folder/device", "/tmp/x.json")))
    assert not any(
        measured.is_path(f"{name}{link}")
        for name in catalog.names()
        for link in ("", *("@" + x for x in catalog.LINKS))
    )
