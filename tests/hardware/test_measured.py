"""A measured device comes back from its file as it was, and no damaged file passes for one."""

import dataclasses
import json
from pathlib import Path

import pytest

from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog, measured
from tests.hardware.test_files import GPU


def test_its_file_has_the_fields_of_a_device(tmp_path: Path) -> None:
    GPU.save(tmp_path / "device.json")
    document = json.loads((tmp_path / "device.json").read_text())
    fields = {field.name for field in dataclasses.fields(catalog.Device)}
    assert fields | {"platform", "device_kind", "format"} == set(document)


def test_a_gpu_without_a_target_is_refused(tmp_path: Path) -> None:
    dataclasses.replace(GPU, device=dataclasses.replace(GPU.device, target=None)).save(
        tmp_path / "device.json"
    )
    with pytest.raises(UnknownDeviceError, match="its 'target' is null"):
        measured.load(tmp_path / "device.json")


def test_files_and_names_are_told_apart() -> None:
    assert all(
        map(measured.is_path, ("a.json", "A.JSON", "./device", "folder/device", "/tmp/x.json"))
    )
    links = "", *("@" + link for link in catalog.LINKS)
    assert not any(measured.is_path(name + link) for name in catalog.names() for link in links)
