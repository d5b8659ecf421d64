"""What XLA is told of a GPU that is absent."""

from __future__ import annotations

import re

import pytest

from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog
from memplan.xla.described_gpu import target_config


def fields(name: str) -> dict[str, str]:
    return dict(re.findall(r"^  (\w+): (\S+)$", target_config(catalog.named(name)), re.MULTILINE))


@pytest.mark.parametrize("name", catalog.names())
def test_figures_are_those_of_the_specification(name: str) -> None:
    device, found = catalog.named(name), fields(name)
    chip = device.target
    assert chip is not None
    assert int(found["device_memory_size"]) == device.memory_bytes
    assert int(found["memory_bandwidth"]) == device.memory_bandwidth
    assert int(found["core_count"]) == chip.core_count
    assert int(found["l2_cache_size"]) == chip.l2_cache_bytes
    assert int(found["shared_memory_per_block_optin"]) == chip.shared_memory_per_block_optin
    assert float(found["clock_rate_ghz"]) == chip.clock_ghz


def test_threads_go_by_the_chips_generation() -> None:
    most = {name: fields(name)["threads_per_core_limit"] for name in ("v100", "a100", "rtx4090", "h100")}
    assert most == {"v100": "2048", "a100": "2048", "rtx4090": "1536", "h100": "2048"}


@pytest.mark.parametrize("name", catalog.names())
def test_a_chips_features_are_accelerated_from_hopper_on(name: str) -> None:
    chip, text = catalog.named(name).target, target_config(catalog.named(name))
    assert chip is not None
    major, minor = chip.compute_capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} " in text
    assert ("ACCELERATED_FEATURES" in text) == (major >= 9)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnknownDeviceError, match="cpu is not a GPU"):
        target_config(catalog.local_cpu(2, 2**30))
