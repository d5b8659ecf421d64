"""A measured device comes back from its file as it was, and no damaged file passes for one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog, measured
from memplan.hardware.measured import MeasuredDevice
from tests.hardware.documents import edited

CPU = MeasuredDevice(catalog.local_cpu(4, 8 * 2**30), "cpu", "cpu")
GPU = MeasuredDevice(catalog.named("h200"), "gpu", "NVIDIA H200")


@pytest.mark.parametrize("saved", [CPU, GPU], ids=["cpu", "gpu"])
def test_saved_and_loaded_it_is_the_same(saved: MeasuredDevice, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    saved.save(path)
    loaded = measured.load(path)
    assert loaded == saved and loaded.device.flops == saved.device.flops
    assert hash(loaded.device) == hash(saved.device)
    assert [entry.name for entry in tmp_path.iterdir()] == ["device.json"]


def text_of(device: MeasuredDevice, folder: Path) -> str:
    device.save(folder / "device.json")
    return (folder / "device.json").read_text()


def test_its_file_has_the_fields_of_a_device(tmp_path: Path) -> None:
    document = json.loads(text_of(GPU, tmp_path))
    fields = {field.name for field in dataclasses.fields(catalog.Device)}
    assert fields | {"platform", "device_kind", "format"} == set(document)


def test_truncated_anywhere_it_is_refused(tmp_path: Path) -> None:
    text = text_of(CPU, tmp_path)
    path = tmp_path / "device.json"
    for length in range(0, len(text) - 1, 97):
        path.write_text(text[:length])
        with pytest.raises(UnknownDeviceError, match=r"device\.json.*calibrate"):
            measured.load(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", "[" * 100_000])
def test_what_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(UnknownDeviceError, match="is not a complete device file"):
        measured.load(path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("format", 1, "its format is 1"),
        ("memory_bandwidth", None, "no entry 'memory_bandwidth'"),
        ("link.latency_s", None, "no entry 'link.latency_s'"),
        ("target", [1], "its 'target'"),
        ("platform", None, "its 'platform' is None, not text"),
        ("device_kind", 3, "its 'device_kind' is 3, not text"),
        ("name", 5, "its 'name' is 5, not text"),
        ("memory_bytes", 1.5, "its 'memory_bytes' is 1.5, not a whole number"),
        ("memory_bytes", True, "its 'memory_bytes'"),
        ("memory_bandwidth", "fast", "its 'memory_bandwidth' is 'fast', not a number"),
        ("memory_bandwidth", 0, "which is not possible"),
        ("vector_flops", float("nan"), "its 'vector_flops' is nan"),
        ("vector_flops", float("inf"), "its 'vector_flops' is inf"),
        ("vector_flops", 10**400, "calibrate"),
        ("flops", {}, "no entry 'float32'"),
        ("flops.float32", -1.0, "its 'flops.float32' is -1.0"),
    ],
)
def test_a_damaged_file_is_refused_and_says_where(
    where: str,
    value: Any,
    message: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "device.json"
    path.write_text(edited(text_of(CPU, tmp_path), where, value))
    with pytest.raises(UnknownDeviceError, match=message) as caught:
        measured.load(path)
    assert "memplan calibrate --out" in str(caught.value)


def test_a_gpu_without_a_target_is_refused(tmp_path: Path) -> None:
    dataclasses.replace(GPU, device=dataclasses.replace(GPU.device, target=None)).save(tmp_path / "device.json")
    with pytest.raises(UnknownDeviceError, match="its 'target' is null"):
        measured.load(tmp_path / "device.json")


def test_what_cannot_be_read_is_an_unknown_device(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UnknownDeviceError, match="cannot be read"):
            measured.load(path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnknownDeviceError, match="is not a complete device file"):
        measured.load(tmp_path / "bytes.json")


def test_files_and_names_are_told_apart() -> None:
    assert all(map(measured.is_path, ("a.json", "A.JSON", "./device", "folder/device", "/tmp/x.json")))
    assert not any(
        measured.is_path(f"{name}{link}")
        for name in catalog.names()
        for link in ("", *("@" + x for x in catalog.LINKS))
    )
