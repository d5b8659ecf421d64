"""What a report says beyond its figures: versions, and what happens to the residuals of loops."""

from __future__ import annotations

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


def test_versions_are_of_what_changes_the_figures() -> None:
    theirs = [(name, importlib.metadata.version(name)) for name in ("jax", "jaxlib")]
    assert versions() == (("python", platform.python_version()), ("memplan", memplan.__version__), *theirs)


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
def test_what_jax_jit_takes_is_compiled_where_xla_rematerializes(
    layers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Independently: the plain step under XLA's defaults."""
    args = [array(1024, 1024)] * layers, array(2**18, 1024)
    report = memplan.jit(gelu, device="v100", donate_argnums=0).plan(*args).report
    assert "hlo_remat" not in capfd.readouterr().err
    assert report.baseline_peak_bytes is not None and report.xla_limit_bytes is not None
    plain = Target(catalog.named("v100"), described=True).compile(Lowerable(gelu, args, {}, {"donate_argnums": 0}))
    assert report.jit_peak_bytes == pytest.approx(plain.memory.device_bytes, abs=1024)
    rematerializes = ".remat" in plain.text
    assert rematerializes == (layers == 12) == (report.baseline_peak_bytes > report.xla_limit_bytes)
    assert (report.jit_peak_bytes < report.baseline_peak_bytes) == rematerializes
    assert ("by jax.jit" in str(report)) == rematerializes


@pytest.mark.parametrize("device", [None, pytest.param("v100", marks=pytest.mark.gpu_aot)])
def test_what_a_step_closes_over_is_counted_as_if_it_were_an_argument(device: str | None) -> None:
    step, (state, x) = dense(128, 6)
    batch = np.asarray(x)

    def closed(state: Any) -> Any:
        return step(state, batch)

    given = memplan.jit(step, device=device, donate_argnums=0).plan(state, x).report
    found = memplan.jit(closed, device=device, donate_argnums=0).plan(state).report
    assert (found.constant_bytes, given.constant_bytes) == (batch.nbytes, 0)
    assert found.compiled_peak_bytes == given.compiled_peak_bytes
    assert found.baseline_peak_bytes == found.predicted_peak_bytes == given.predicted_peak_bytes
    assert found.floor_bytes == given.floor_bytes
    (row,) = (one for one in found.live_at_peak if one.name.endswith("a constant"))
    assert (row.nbytes, row.shape) == (batch.nbytes, "float32[1024,128]") and "steps.py:" in row.source
    assert found.timeline is not None and found.compiled_peak_bytes is not None
    assert ("constants", batch.nbytes) in [(value.name, value.nbytes) for value in found.timeline.values]

    budget = int(0.9 * found.compiled_peak_bytes)
    planned = memplan.jit(closed, device=device, budget=budget, donate_argnums=0, split=False).plan(state).report
    assert planned.status == "fits" and planned.constant_bytes == batch.nbytes
    assert planned.compiled_peak_bytes is not None and planned.compiled_peak_bytes <= budget
    assert planned.compiled_peak_bytes == pytest.approx(planned.predicted_peak_bytes, abs=1024)


def test_constants_of_loops_are_counted() -> None:
    table = np.arange(2**15, dtype=np.float32).reshape(128, 256)

    def step(x: jax.Array, table: Any = table) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ table @ table.T), x)

    given = memplan.jit(step).plan(array(64, 128), array(128, 256)).report
    report = memplan.jit(step).plan(array(64, 128)).report
    assert given.constant_bytes == 0 and report.constant_bytes == 2 * table.nbytes  # XLA transposes it beforehand
    more = report.constant_bytes - table.nbytes
    assert report.predicted_peak_bytes == given.predicted_peak_bytes + more
    assert report.compiled_peak_bytes == (given.compiled_peak_bytes or 0) + more
    assert sum(one.nbytes for one in report.live_at_peak if "a constant" in one.name) == report.constant_bytes


@pytest.mark.parametrize("device", [None, pytest.param("v100", marks=pytest.mark.gpu_aot)])
def test_all_that_is_on_the_device_at_the_peak_is_named(device: str | None) -> None:
    step, (state, x) = dense(128, 6)
    kept = memplan.jit(step, device=device, donate_argnums=0).plan(state, x).report
    own = memplan.jit(step, device=device).plan(state, x).report
    for report in (kept, own):
        assert report.timeline is not None
        peak = report.timeline.instants[report.timeline.peak]
        left = report.predicted_peak_bytes - sum(one.nbytes for one in report.live_at_peak) - peak.other_bytes
        assert left == 8 * (len(jax.tree.leaves(state)) + 1)  # the outputs' table of pointers
        assert peak.source and report.peak_kernel.endswith(f", {peak.source}") and report.peak_kernel in str(report)
    outputs = [[one for one in report.live_at_peak if one.name.endswith(", an output")] for report in (kept, own)]
    nbytes = [sum(one.nbytes for one in some) for some in outputs]
    state_nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert nbytes[1] - nbytes[0] == state_nbytes and nbytes[0] <= 256
    assert all("steps.py:" in one.source for one in outputs[1] if one.nbytes > 256)


@pytest.mark.parametrize("step", [lambda x: None, lambda x: x, lambda x: (1.0, 2)], ids=["nothing", "input", "numbers"])
def test_a_step_without_kernels_has_a_report(step: Any) -> None:
    report = memplan.jit(step).plan(jax.ShapeDtypeStruct((1024,), jnp.float32)).report
    assert report.compiled_peak_bytes == report.baseline_peak_bytes and report.status == "untouched"
