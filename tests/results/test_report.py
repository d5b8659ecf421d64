"""Figures of reports: versions, plain jax.jit, constants, arrays at the peak."""

import importlib.metadata
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.hardware import catalog
from memplan.program.lowerable import Lowerable
from memplan.results.report import versions
from memplan.xla.target import Target
from tests.xla.steps import array, dense


def test_versions_of_all_software_that_affects_the_figures() -> None:
    theirs = [(name, importlib.metadata.version(name)) for name in ("jax", "jaxlib")]
    own = ("python", platform.python_version()), ("memplan", memplan.__version__)
    assert versions() == (*own, *theirs)


def gelu(weights: list[jax.Array], x: jax.Array) -> Any:
    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x
        for weight in weights:
            y = jax.nn.gelu(y @ weight)
        return (y**2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


@pytest.mark.gpu_aot
@pytest.mark.parametrize("layers", [2, 12])
def test_figures_of_jit_are_those_of_the_step_unless_xla_rematerializes(layers: int) -> None:
    """Independently: the plain step under XLA's defaults."""
    args = [array(1024, 1024)] * layers, array(2**18, 1024)
    report = memplan.jit(gelu, device="v100", donate_argnums=0).plan(*args).report
    assert report.baseline_peak_bytes is not None and report.xla_limit_bytes is not None
    plain = Target(catalog.named("v100"), described=True).compile(
        Lowerable(gelu, args, {}, {"donate_argnums": 0})
    )
    rematerializes = ".remat" in plain.text
    assert rematerializes == (layers == 12) == (report.baseline_peak_bytes > report.xla_limit_bytes)
    assert (report.jit_peak_bytes is None) == rematerializes
    if report.jit_peak_bytes is not None:
        assert report.jit_peak_bytes == pytest.approx(plain.memory.device_bytes, abs=1024)
    assert ("by jax.jit" in str(report)) == rematerializes


@pytest.mark.parametrize("device", [None, pytest.param("v100", marks=pytest.mark.gpu_aot)])
def test_captured_arrays_count_like_arguments(device: str | None) -> None:
    step, (state, x) = dense(128, 6)
    batch = np.asarray(x)

    def closed(state: Any) -> Any:
        return step(state, batch)

    of_arguments = memplan.jit(step, device=device, donate_argnums=0).plan(state, x).report
    of_constants = memplan.jit(closed, device=device, donate_argnums=0).plan(state).report
    assert (of_constants.constant_bytes, of_arguments.constant_bytes) == (batch.nbytes, 0)
    assert of_constants.compiled_peak_bytes == of_arguments.compiled_peak_bytes
    assert (
        of_constants.baseline_peak_bytes
        == of_constants.predicted_peak_bytes
        == of_arguments.predicted_peak_bytes
    )
    assert of_constants.floor_bytes == of_arguments.floor_bytes
    (row,) = (value for value in of_constants.live_at_peak if value.name.endswith("a constant"))
    assert (row.nbytes, row.shape) == (batch.nbytes, "float32[1024,128]")
    assert "steps.py:" in row.source
    assert ("constants", batch.nbytes) in [
        (value.name, value.nbytes) for value in of_constants.timeline.values
    ]

    budget = int(0.9 * of_constants.compiled_peak_bytes)
    planned = (
        memplan.jit(closed, device=device, budget=budget, donate_argnums=0, split=False)
        .plan(state)
        .report
    )
    assert planned.status == "fits" and planned.constant_bytes == batch.nbytes
    assert planned.compiled_peak_bytes <= budget
    assert planned.compiled_peak_bytes == pytest.approx(planned.predicted_peak_bytes, abs=1024)


def test_constants_of_loops_are_counted() -> None:
    table = np.arange(2**15, dtype=np.float32).reshape(128, 256)

    def step(x: jax.Array, table: Any = table) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ table @ table.T), x)

    of_arguments = memplan.jit(step).plan(array(64, 128), array(128, 256)).report
    report = memplan.jit(step).plan(array(64, 128)).report
    # XLA transposes it beforehand
    assert of_arguments.constant_bytes == 0 and report.constant_bytes == 2 * table.nbytes
    more = report.constant_bytes - table.nbytes
    assert report.predicted_peak_bytes == of_arguments.predicted_peak_bytes + more
    assert report.compiled_peak_bytes == (of_arguments.compiled_peak_bytes or 0) + more
    assert (
        sum(value.nbytes for value in report.live_at_peak if "a constant" in value.name)
        == report.constant_bytes
    )


@pytest.mark.parametrize("device", [None, pytest.param("v100", marks=pytest.mark.gpu_aot)])
def test_all_arrays_at_the_peak_are_named(device: str | None) -> None:
    step, (state, x) = dense(128, 6)
    kept = memplan.jit(step, device=device, donate_argnums=0).plan(state, x).report
    own = memplan.jit(step, device=device).plan(state, x).report
    for report in (kept, own):
        arrays = len(jax.tree.leaves((state, x)))
        passed_s = None if device is None else pytest.approx(arrays * 6e-6)
        assert report.dispatch_s == passed_s
        peak = report.timeline.instants[report.timeline.peak]
        live = sum(value.nbytes for value in report.live_at_peak)
        unexplained = report.predicted_peak_bytes - live - peak.other_bytes
        # the outputs' table of pointers
        assert unexplained == 8 * (len(jax.tree.leaves(state)) + 1)
        assert (
            peak.source
            and report.peak_kernel.endswith(f", {peak.source}")
            and report.peak_kernel in str(report)
        )
    outputs = [
        [value for value in report.live_at_peak if value.name.endswith(", an output")]
        for report in (kept, own)
    ]
    nbytes = [sum(value.nbytes for value in values) for values in outputs]
    state_nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert nbytes[1] - nbytes[0] == state_nbytes and nbytes[0] <= 256
    assert all("steps.py:" in value.source for value in outputs[1] if value.nbytes > 256)


@pytest.mark.parametrize(
    "step", [lambda x: None, lambda x: x, lambda x: (1.0, 2)], ids=["nothing", "input", "numbers"]
)
def test_a_step_without_kernels_has_a_report(step: Any) -> None:
    report = memplan.jit(step).plan(jax.ShapeDtypeStruct((1024,), jnp.float32)).report
    assert report.compiled_peak_bytes == report.baseline_peak_bytes and report.status == "untouched"
