"""Which specification stands for the device that jax runs on here."""

from __future__ import annotations

import dataclasses

import pytest

from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog
from memplan.xla import local
from memplan.xla.local import closest_name


def test_a_card_without_a_specification_is_refused_with_the_nearest() -> None:
    assert closest_name("NVIDIA H200") == "h200"
    assert closest_name("Tesla V100-SXM2-32GB").startswith("v100")
    with pytest.raises(UnknownDeviceError, match="Pass device="):
        closest_name("Voodoo 2")


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


def test_a_gpu_of_which_too_little_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.jax, "local_devices", lambda: [Card()])
    with pytest.raises(UnknownDeviceError, match=r"'Voodoo 2'.*Plan for the nearest of: .*h200"):
        local.is_here(dataclasses.replace(catalog.named("h200"), target=None), "gpu", "Voodoo 2")


def test_the_longest_name_that_fits_is_the_cards() -> None:
    assert closest_name("NVIDIA GH200 480GB") == "gh200"
    assert closest_name("NVIDIA GeForce RTX 4090") == "rtx4090"


def test_a_gpu_has_the_memory_that_jax_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = catalog.named("h200")
    stats: dict[str, int] = {}
    monkeypatch.setattr(Card, "memory_stats", lambda _: stats, raising=False)
    monkeypatch.setattr(local.jax, "local_devices", lambda: [Card()])
    assert local.local_device() == h200 and local.observed_peak_bytes() is None
    stats.update(bytes_limit=10**9, peak_bytes_in_use=7)
    assert local.local_device() == dataclasses.replace(h200, memory_bytes=10**9)
    assert local.observed_peak_bytes() == 7
