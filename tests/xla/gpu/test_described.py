"""What XLA is told of a GPU that is absent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from memplan import pipeline
from memplan.compilation.outcome import Outcome
from memplan.errors import UnknownDeviceError
from memplan.hardware import catalog
from memplan.hardware.backend import GPU
from memplan.hardware.device import GpuTarget
from memplan.program.lowerable import Lowerable
from memplan.request import Request
from memplan.xla.gpu.described import target_config
from memplan.xla.target import Target
from tests.xla.thunks import dump_options, dumped_thunks

GPUS = [name for name, device in catalog.DEVICES.items() if device.backend is GPU]


def fields(name: str) -> dict[str, str]:
    return dict(re.findall(r"^  (\w+): (\S+)$", target_config(catalog.named(name)), re.MULTILINE))


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_those_of_the_specification(name: str) -> None:
    device, spec = catalog.named(name), fields(name)
    chip = device.target
    assert isinstance(chip, GpuTarget)
    assert int(spec["device_memory_size"]) == device.memory_bytes
    assert int(spec["memory_bandwidth"]) == device.memory_bandwidth
    assert int(spec["core_count"]) == chip.core_count
    assert int(spec["l2_cache_size"]) == chip.l2_cache_bytes
    assert int(spec["shared_memory_per_block_optin"]) == chip.shared_memory_per_block_optin
    assert float(spec["clock_rate_ghz"]) == chip.clock_ghz


def test_threads_go_by_the_chips_generation() -> None:
    limits = {
        name: fields(name)["threads_per_core_limit"] for name in ("v100", "a100", "rtx4090", "h100")
    }
    assert limits == {"v100": "2048", "a100": "2048", "rtx4090": "1536", "h100": "2048"}


@pytest.mark.parametrize("name", GPUS)
def test_a_chips_features_are_accelerated_from_hopper_on(name: str) -> None:
    chip, text = catalog.named(name).target, target_config(catalog.named(name))
    assert isinstance(chip, GpuTarget)
    major, minor = chip.compute_capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} " in text
    assert ("ACCELERATED_FEATURES" in text) == (major >= 9)


@pytest.mark.gpu_aot
def test_products_are_in_cuda_graphs_as_on_a_gpu_with_a_driver(tmp_path: Path) -> None:
    """XLA of jax 0.11 leaves them out of graphs where the driver is older than CUDA 12.3, or not told."""
    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    v100 = Target(catalog.named("v100"), described=True)
    v100.compile(
        Lowerable(lambda x: jnp.sin(jnp.sin(jnp.sin(x @ x) @ x) @ x), (square,)),
        dump_options(tmp_path),
    )
    [graph] = dumped_thunks(tmp_path, after_passes=True)
    assert graph.kind == "kCommandBuffer" and graph.has("kCublasLtMatmul")


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnknownDeviceError, match="cpu is not a GPU"):
        target_config(catalog.local_cpu(2, 2**30))


CALLS: list[Callable[[jax.Array], Any]] = [
    lambda x: jax.debug.print("{}", x.mean()),
    lambda x: jax.debug.callback(lambda y: None, x.mean(), ordered=True),
    lambda x: io_callback(lambda y: None, None, jax.lax.stop_gradient(x)),
    lambda x: io_callback(lambda y: None, None, jax.lax.stop_gradient(x).sum(), ordered=True),
    lambda x: jax.pure_callback(np.cos, x[0], jax.lax.stop_gradient(x[0])),
]


@pytest.mark.gpu_aot
def test_a_step_that_calls_python_is_planned_and_calls_as_often() -> None:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = x
            for w, call in zip(weights, CALLS, strict=True):
                y = jnp.tanh(y @ w)
                output = call(y)
                y = y if output is None else y + output
            return (y * y).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, gradient: w - 0.1 * gradient, weights, gradients), value

    args = (
        [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 5,
        jax.ShapeDtypeStruct((65536, 512), jnp.float32),
    )

    def planned(budget: int | None) -> Outcome:
        return pipeline.best(
            step, args, {}, {"donate_argnums": 0}, Request(budget, device="v100", split=False)
        )

    def calls(outcome: Outcome) -> int:
        return outcome.executable.text.count('custom_call_target="xla_ffi_python_gpu_callback"')

    plain = planned(None)
    outcome = planned(budget := int(0.7 * plain.device_bytes))
    assert (
        outcome.device_bytes <= budget
        and outcome.method == "kernels"
        and calls(outcome) == calls(plain) == len(CALLS)
    )
