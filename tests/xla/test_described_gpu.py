"""The text that describes an absent GPU to XLA says what the catalog says."""

from __future__ import annotations

import re

import pytest

from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog
from memplan.xla.described_gpu import target_config


@pytest.mark.parametrize("name", catalog.names())
def test_a_description_has_the_figures_of_the_catalog(name: str) -> None:
    device = catalog.named(name)
    text = target_config(device)
    said = {key: float(value) for key, value in re.findall(r"^  (\w+): ([\d.]+)$", text, re.MULTILINE)}
    assert device.target is not None
    assert said["device_memory_size"] == device.memory_bytes
    assert said["memory_bandwidth"] == int(device.memory_bandwidth)
    assert said["core_count"] == device.target.core_count and said["l2_cache_size"] == device.target.l2_cache_bytes
    major, minor = device.target.compute_capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} " in text
    assert ("ACCELERATED_FEATURES" in text) == (major >= 9)


def test_a_cpu_is_none() -> None:
    with pytest.raises(UnknownDeviceError, match="is not a GPU"):
        target_config(catalog.local_cpu(2, 2**33))
