"""Which specification stands for the device that jax runs on here."""

from __future__ import annotations

import dataclasses

import pytest

from memplan.errors import BudgetError, UnknownDeviceError
from memplan.hardware import catalog
from memplan.xla import local
from memplan.xla.local import Pool, closest_name


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


def test_the_longest_name_that_fits_is_the_cards() -> None:
    assert closest_name("NVIDIA GH200 480GB") == "gh200"
    assert closest_name("NVIDIA GB200") == "gb200"
    assert closest_name("NVIDIA B200") == "b200"
    assert closest_name("NVIDIA GeForce RTX 4090") == "rtx4090"


def test_a_gpu_has_the_memory_that_jax_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = catalog.named("h200")
    stats: dict[str, int] = {}
    monkeypatch.setattr(Card, "memory_stats", lambda _: stats, raising=False)
    monkeypatch.setattr(local.jax, "local_devices", lambda: [Card()])
    assert local.local_device() == h200 and local.room() is None
    stats.update(
        bytes_limit=100,
        bytes_in_use=20,
        peak_bytes_in_use=70,
        pool_bytes=40,
        largest_free_block_bytes=10,
    )
    assert local.local_device() == dataclasses.replace(h200, memory_bytes=100)
    assert local.room() == local.Room(
        in_use_bytes=20, peak_bytes=70, limit_bytes=100, block_bytes=60
    )
    stats.update(pool_bytes=100)
    assert local.room() == local.Room(
        in_use_bytes=20, peak_bytes=70, limit_bytes=100, block_bytes=10
    )


def test_the_pools_are_those_of_the_environment() -> None:
    assert local.pools({}) == local.Pools() == local.Pools(0.75, True, 64 << 30, False, True)
    assert local.pools({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}).of_device(2**34, 0.75).grows
    assert (
        local.pools({"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_ALLOCATOR": "BFC"})
        == local.Pools()
    )
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert local.pools({name: ".9"}).fraction == 0.9
    assert local.pools({"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "70"}).host.limit_bytes == 70 << 30
    assert local.pools({"XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "True"}).host == Pool(
        16 << 30, grows=False
    )
    assert not local.pools({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}).of_bfc


@pytest.mark.parametrize(
    "name",
    [
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
    ],
)
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(BudgetError, match=f"{name}=64GiB is not a number.*export {name}="):
        local.pools({name: "64GiB"})


def test_a_pool_ends_at_whole_pieces_of_memory() -> None:
    # a V100 of 16,144 MiB, of which jax's client said that it may use 12,696,158,208 bytes
    assert local.Pools().of_device(16144 << 20, 0.75) == Pool(12696158208, grows=False)


@pytest.mark.parametrize(
    ("environ", "setting"),
    [
        ({}, ""),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, ""),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "VMM"}, "XLA_PYTHON_CLIENT_ALLOCATOR=vmm"),
        ({"XLA_FLAGS": "--xla_gpu_command_buffer_update_mode=ALWAYS_UPDATE"}, ""),
        (
            {"XLA_FLAGS": "--a=b --xla_gpu_command_buffer_update_mode=SKIP_TEMP --c"},
            "XLA_FLAGS=--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
        ),
    ],
)
def test_an_allocator_that_knows_one_memory_is_named(environ: dict[str, str], setting: str) -> None:
    assert local.without_spaces(environ) == setting
