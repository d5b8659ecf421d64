"""The device table: complete, consistent with itself, immutable, and helpful about names it does not know."""

import dataclasses
from typing import Any, cast

import pytest

from memplan.hardware import catalog
from memplan.hardware.backend import GPU
from memplan.hardware.device import Device, HostLink

DTYPES = {"float64", "float32", "bfloat16", "float16", "int8"}
GPUS = [device for device in catalog.DEVICES.values() if device.backend is GPU]
CPU = catalog.local_cpu(cores=4, memory_bytes=8 * 2**30)
GPU_IDS = [device.name for device in GPUS]


@pytest.mark.parametrize("device", [*GPUS, CPU], ids=[*GPU_IDS, "cpu"])
def test_every_device_is_complete_and_positive(device: Device) -> None:
    assert device.description
    assert device.sources and all(device.sources)
    assert isinstance(device.memory_bytes, int) and device.memory_bytes > 0
    assert device.memory_bandwidth > 0
    assert set(device.flops) == DTYPES and all(rate > 0 for rate in device.flops.values())
    assert device.vector_flops > 0


@pytest.mark.parametrize("link", list(catalog.LINKS.values()), ids=list(catalog.LINKS))
def test_every_link_is_complete_and_positive(link: HostLink) -> None:
    assert link.bandwidth > 0 and link.latency_s > 0 and link.source


@pytest.mark.parametrize("device", GPUS, ids=GPU_IDS)
def test_targets_are_whole_and_explain_the_published_vector_rate(device: Device) -> None:
    target = device.target
    assert all(value > 0 for value in dataclasses.astuple(target)[1:])
    assert target.shared_memory_per_block_optin <= target.shared_memory_per_core
    fused_multiply_adds = target.core_count * target.fpus_per_core * target.clock_ghz * 1e9
    assert device.vector_flops == pytest.approx(2 * fused_multiply_adds, rel=0.01)


@pytest.mark.parametrize("device", GPUS, ids=GPU_IDS)
def test_narrower_types_are_never_slower_and_the_host_is_never_nearer(device: Device) -> None:
    assert device.flops["float64"] <= device.flops["float32"] <= device.flops["float16"]
    assert device.vector_flops <= device.flops["float32"]
    assert device.link.bandwidth < device.memory_bandwidth


def test_pcie_doubles_with_each_generation_and_stays_below_its_name() -> None:
    three, four, five = (
        catalog.LINKS[f"pcie{generation}x16"].bandwidth for generation in (3, 4, 5)
    )
    assert three < 16e9
    assert four == pytest.approx(2 * three) and five == pytest.approx(2 * four)
    assert catalog.LINKS["nvlink-c2c"].bandwidth < 450e9
    assert catalog.LINKS["power9-nvlink2"].bandwidth < 75e9


def test_the_promised_devices_are_there() -> None:
    gpus = {"p100", "v100", "a100", "h100", "h200", "b200", "rtx4090", "gh200", "gb200"}
    tpus = {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert gpus | tpus == set(catalog.names())
    assert gpus == {device.name for device in GPUS}


@pytest.mark.parametrize("name", catalog.names())
def test_names_round_trip_in_any_case(name: str) -> None:
    device = catalog.named(name)
    assert device.name == name
    assert catalog.named(f" {name.upper()} ") == device
    assert hash(catalog.named(name)) == hash(device)


@pytest.mark.parametrize("link", catalog.LINKS)
@pytest.mark.parametrize("name", catalog.names())
def test_any_device_goes_behind_any_link(name: str, link: str) -> None:
    plain = catalog.named(name)
    moved = catalog.named(f"{name}@{link}".upper())
    assert moved.name == f"{name}@{link}"
    assert moved.link == catalog.LINKS[link]
    assert dataclasses.replace(moved, name=plain.name, link=plain.link) == plain
    assert catalog.named(moved.name) == moved


def test_nothing_can_be_changed() -> None:
    device = catalog.named("v100")
    for frozen, attribute in (
        (device, "name"),
        (device.link, "bandwidth"),
        (device.target, "clock_ghz"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, attribute, None)
    for mapping in (device.flops, catalog.DEVICES, catalog.LINKS):
        with pytest.raises(TypeError):
            cast(Any, mapping)["float32"] = 1.0


def test_a_cpu_grows_with_its_cores() -> None:
    small = catalog.local_cpu(1, 2**30)
    large = catalog.local_cpu(64, 2**38)
    assert (small.name, small.link.name, small.target) == ("cpu", "local-memory", None)
    assert (small.memory_bytes, large.memory_bytes) == (2**30, 2**38)
    assert large.vector_flops == 64 * small.vector_flops
    assert large.memory_bandwidth == 8 * small.memory_bandwidth
    assert catalog.local_cpu(2, 2**30).memory_bandwidth == small.memory_bandwidth


@pytest.mark.parametrize(("cores", "memory_bytes"), [(0, 2**30), (-1, 2**30), (4, 0)])
def test_a_cpu_without_cores_or_memory_is_refused(cores: int, memory_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least one core"):
        catalog.local_cpu(cores, memory_bytes)
