"""What XLA:TPU is asked, and what it says, without libtpu."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import memplan
from memplan.errors import UnknownDeviceError, UnsupportedProgramError
from memplan.hardware import catalog
from memplan.hardware.backend import TPU
from memplan.xla.platform import OverLimitError
from memplan.xla.tpu import platform as tpu_platform
from memplan.xla.tpu.platform import TpuPlatform

V5E = catalog.named("v5e")
MIB = 2**20
TPUS = [name for name, device in catalog.DEVICES.items() if device.backend is TPU]


@pytest.mark.parametrize(
    ("said", "least", "most"),
    [
        ("the total memory required for HLO temporaries (704.38M)", 704.375, 704.391),
        ("the total memory required for HLO temporaries (1.04G)", 1060.0, 1075.21),
        ("the total memory required for HLO temporaries (512K)", 0.5, 0.501),
    ],
)
def test_what_a_module_takes_is_no_less_than_said(said: str, least: float, most: float) -> None:
    start = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM"
    message = f"{start}, {said} exceeds available HBM (16.00M). HLO module: jit_step."
    refusal = TpuPlatform().explanation(message, V5E)
    assert isinstance(refusal, OverLimitError)
    assert least <= refusal.device_bytes / MIB <= most


def test_a_refusal_after_code_generation_is_understood() -> None:
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of "
        "memory in memory space hbm. Used 2.55G of 2.55G hbm. Exceeded hbm capacity by 3.06M.\n"
        "Total hbm usage >= 2.80G:"
    )
    refusal = TpuPlatform().explanation(message, V5E)
    assert isinstance(refusal, OverLimitError)
    assert refusal.device_bytes == 2.56 * 2**30 // 1 + 1


def test_other_failures_are_not_refusals() -> None:
    assert TpuPlatform().explanation("INTERNAL: something else (3.00M)", V5E) is None


def test_the_limit_leaves_room_for_the_program_but_never_exceeds_the_chip() -> None:
    def limit(nbytes: int) -> int:
        options = TpuPlatform().options_for_plan({}, nbytes, V5E.memory_bytes)
        return int(options["xla_tpu_max_hbm_size_mib"])

    assert limit(1000 * MIB) == 1128
    assert limit(V5E.memory_bytes) == V5E.memory_bytes // MIB
    assert limit(2**60) == V5E.memory_bytes // MIB


def test_temporaries_are_what_is_allocated_without_the_rest() -> None:
    stats = SimpleNamespace(
        total_allocation_bytes=1000,
        argument_size_in_bytes=300,
        output_size_in_bytes=200,
        alias_size_in_bytes=100,
        temp_size_in_bytes=5000,
    )
    assert TpuPlatform().temporary_bytes(stats, constant_bytes=50) == 550


@pytest.mark.parametrize("name", TPUS)
def test_the_catalog_has_what_is_compiled_for(name: str) -> None:
    device = catalog.named(name)
    assert device.target is not None and device.has_matrix_units("bfloat16")
    assert device.compute_capability == (0, 0)
    assert device.link.bandwidth < device.memory_bandwidth
    assert device.efficiency.error is None and "Assumed" in device.efficiency.source


def test_a_step_over_several_tpus_is_refused_by_name() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=rows)
    with pytest.raises(UnsupportedProgramError, match=r"runs on 4 devices.* one v5e alone"):
        memplan.jit(jnp.sin, device="v5e").plan(x)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    tpu_platform._described_devices.cache_clear()
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with pytest.raises(UnknownDeviceError, match=r"pip install 'memplan\[tpu-aot\]'"):
        memplan.jit(jnp.sin, device="v5e").plan(x)
    tpu_platform._described_devices.cache_clear()
