"""Compiling for a device: bytes by the compiler, its live set named, and clear words where there is no compiler."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import memplan
from memplan.errors import MemplanError, UnknownDeviceError, UnsupportedProgramError
from memplan.hardware import catalog
from memplan.program.lowerable import Lowerable
from memplan.xla.gpu.platform import GpuPlatform, described_devices
from memplan.xla.local import local_device
from memplan.xla.module import Module
from memplan.xla.platform import Platform
from memplan.xla.target import Target
from tests.dense import step as train

LAYERS, WIDTH, BATCH = 12, 512, 8192
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda12") is None
    if importlib.util.find_spec("jax_plugins")
    else True,
    reason="needs the extra gpu-aot",
)


SHAPES = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS,
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)


@needs_compiler
@pytest.mark.gpu_aot
class TestDescribedGpu:
    def test_every_kind_of_leaf_is_placed(self) -> None:
        args = (
            jnp.ones((4, 4), jnp.bfloat16),
            jax.ShapeDtypeStruct((3,), jnp.int32),
            2.0,
            True,
            jax.random.key(0),
        )
        compiled = Target(catalog.named("h200"), described=True).compile(
            Lowerable(lambda a, b, c, d, key: (a * c, b + 1, d, jax.random.bits(key, (4,))), args)
        )
        assert compiled.compiled.memory_analysis().argument_size_in_bytes == 32 + 12 + 4 + 1 + 8
        assert compiled.compiled.out_info[0].dtype == jnp.bfloat16

    @pytest.mark.parametrize("rewrite", [None, lambda text: None], ids=["plain", "handed over"])
    def test_products_whose_untimed_tile_xla_refuses_are_compiled(self, rewrite: Any) -> None:
        def resized(image: jax.Array) -> jax.Array:
            return jax.image.resize(image, (2, 512, 512, 3), "bilinear")

        image = jax.ShapeDtypeStruct((2, 128, 128, 3), jnp.float32)
        h200 = Target(catalog.named("h200"), described=True)
        compiled = h200.compile(Lowerable(resized, (image,)), rewrite=rewrite)
        assert compiled.compiled.memory_analysis().output_size_in_bytes == 4 * 2 * 512 * 512 * 3
        assert "ENTRY" in compiled.text

    def test_donation_is_seen(self) -> None:
        shape = jax.ShapeDtypeStruct((1024,), jnp.float32)
        target = Target(catalog.named("v100"), described=True)
        memory = target.compile(
            Lowerable(lambda x: x + 1, (shape,), {}, {"donate_argnums": 0})
        ).memory
        assert memory.device_bytes == memory.temp_bytes + 4096

    @pytest.mark.parametrize(
        ("device", "batch"),
        [
            ("v100", 2**18),
            pytest.param("a100", 5 * 2**18, marks=pytest.mark.slow),
            pytest.param("h100", 5 * 2**18, marks=pytest.mark.slow),
        ],
    )
    def test_xla_compiles_a_plan_as_it_was_handed(
        self, device: str, batch: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Its own rematerialization would clone, as it counts what is on the host among what the device holds."""
        weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 20
        batches = jax.ShapeDtypeStruct((batch, 1024), jnp.float32)
        jitted = memplan.jit(train, budget="100%", device=device, donate_argnums=0)
        planned = jitted.plan(weights, batches)
        report, outcome = planned.report, planned._outcome
        assert report.xla_limit_bytes is not None
        assert report.compiled_peak_bytes + report.host_peak_bytes > report.xla_limit_bytes
        compiled = outcome.executable.module
        assert list(compiled.instructions) == list(outcome.planned.result.module.instructions)
        assert report.xla_rematerialized == 0
        assert "remat" not in capfd.readouterr().err


class TestDisabledPasses:
    """A user's own stay disabled: XLA takes an option of one compilation in place of what XLA_FLAGS says."""

    @staticmethod
    def options(users: dict[str, str], platform: Platform = GpuPlatform()) -> Mapping[str, Any]:
        return platform.options_for_plan(users, 1, 2)

    def test_of_the_compilation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=unused")
        options = self.options({"xla_disable_hlo_passes": "dot-merger,copy-fusion"})
        assert options == {"xla_disable_hlo_passes": "dot-merger,copy-fusion,rematerialization"}

    def test_of_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flags = "--xla_gpu_autotune_level=0 --xla_disable_hlo_passes=dot-merger --xla_disable_hlo_passes=a,b"
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert self.options({}) == {"xla_disable_hlo_passes": "dot-merger,a,b,rematerialization"}

    def test_of_a_cpu_none(self) -> None:
        assert self.options({}, Platform()) == {}


def test_the_local_backend_accounts_for_what_it_allocates() -> None:
    memory = (
        Target(local_device(), described=False)
        .compile(Lowerable(lambda x: jnp.sin(x), (jnp.ones(1024),)))
        .memory
    )
    assert memory.device_bytes == memory.temp_bytes + 8192


def test_whatever_goes_wrong_in_planning_is_told_in_words_of_memplan() -> None:
    def raises(module: Module) -> Module:
        return next(module for name in module if name == "no such name")

    target = Target(local_device(), described=False)
    with pytest.raises(
        MemplanError, match=r"StopIteration in raises \(.*test_target.py:\d+\)"
    ) as caught:
        target.compile(Lowerable(lambda x: jnp.sin(x), (jnp.ones(1024),)), rewrite=raises)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownDeviceError, match="v100"):
        memplan.jit(train, device="v1000")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    described_devices.cache_clear()
    yield
    described_devices.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_the_extra_the_error_says_what_to_install() -> None:
    step = memplan.jit(train, device="p100")
    with pytest.raises(UnknownDeviceError, match=r"pip install 'memplan\[gpu-aot\]'") as caught:
        step.plan(*SHAPES)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_the_limit_of_xla_is_the_budget_on_a_described_device() -> None:
    target = Target(catalog.named("v100"), described=True)
    limited, options = target.rematerialized_within(10**9, 10**8)
    assert int(0.8 * limited.device.memory_bytes) == pytest.approx(10**9, abs=2)
    assert options == {"xla_gpu_memory_limit_slop_factor": 100}


def test_the_limit_of_xla_on_a_real_device_is_in_percents() -> None:
    target = Target(catalog.named("v100"), described=False)
    _, options = target.rematerialized_within(target.device.memory_bytes // 2, 0)
    assert options == {"xla_gpu_memory_limit_slop_factor": 62}


@needs_compiler
@pytest.mark.gpu_aot
def test_a_place_that_an_inner_loop_looks_up_compiles() -> None:
    """A canary: jax.jit does not compile it (openxla/xla#49299). Once it does, the second try goes."""
    table, steps = jnp.linspace(1.0, 0.0, 9), jnp.arange(8.0)

    def step(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, t: jax.Array) -> Any:
            return x * table[jnp.searchsorted(jnp.arange(9.0), jnp.full(x.shape[:1], t))][
                :, None
            ], None

        return jax.lax.scan(body, x, steps)[0]

    x = jax.ShapeDtypeStruct((1, 64), jnp.float32)
    described = jax.sharding.SingleDeviceSharding(described_devices(catalog.named("a100"))[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="Failed to evaluate instruction"):
        jax.jit(step).lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=described)).compile(
            {"xla_gpu_autotune_level": 0}
        )
    assert memplan.jit(step, device="a100").plan(x).report.status == "untouched"


@pytest.mark.parametrize(
    "said",
    [
        "INTERNAL: RET_CHECK failure (hlo_verifier.cc:4156) DynamicUpdateSlice instruction shouldn't change layout "
        "memory space from device to host",
        "INTERNAL: RET_CHECK failure (host_offload_utils.cc:98) !tmp_shape_index.empty() Expected shape index to be "
        "non-empty.",
    ],
)
def test_faults_of_xlas_host_offloading_are_told_in_memplans_words(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(
        UnsupportedProgramError, match="cannot compile this step's values in host memory"
    ) as raised:
        memplan.jit(jnp.sin).plan(jax.ShapeDtypeStruct((4,), jnp.float32))
    assert said in str(raised.value) and "host_budget=0" in str(raised.value)
