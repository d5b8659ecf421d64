"""What a report says beyond its figures: versions, and what happens to the residuals of loops."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import jax
import pytest

import memplan
from memplan.hardware import catalog
from memplan.outcome.summary import versions
from memplan.xla.target import Target
from tests.xla.steps import array


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
    plain = Target(catalog.named("v100"), described=True).compile(gelu, args, {}, {"donate_argnums": 0})
    assert report.jit_peak_bytes == pytest.approx(plain.memory.device_bytes, abs=1024)
    rematerializes = ".remat" in plain.text
    assert rematerializes == (layers == 12) == (report.baseline_peak_bytes > report.xla_limit_bytes)
    assert (report.jit_peak_bytes < report.baseline_peak_bytes) == rematerializes
    assert ("by jax.jit" in str(report)) == rematerializes
