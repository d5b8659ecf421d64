"""Plans over described meshes: silent on stderr, and what was assumed is in the report."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import memplan
from memplan.report.model import Report

MESH = AbstractMesh((2, 4), ("host", "device"))
pytestmark = pytest.mark.gpu_aot


def array(*shape: int, spec: Any = ()) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def train(weights: jax.Array, x: jax.Array) -> Any:
    def loss(weights: jax.Array) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda hidden, w: (jnp.tanh(hidden @ w), None), x, weights)
        return (hidden**2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def report(**options: Any) -> Report:
    pytest.importorskip("jax_cuda12_plugin")
    args = array(8, 128, 128), array(1024, 128, spec=(("host", "device"),))
    return memplan.jit(train, device="h100", donate_argnums=0, **options).plan(*args).report


def test_xla_prints_no_instructions_without_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    planned = report()
    assert planned.mesh is not None and planned.mesh.collectives  # a profile was made
    assert "profile" not in capfd.readouterr().err
    assert planned.mesh.assumed.startswith("hosts and links, as of hosts with eight NVIDIA H100")
    assert "400 Gb/s" in planned.mesh.assumed and "topology= describes others" in str(planned)
    assert Report.from_json(planned.to_json()).mesh == planned.mesh


def test_a_described_machine_assumes_nothing() -> None:
    planned = report(topology="ddl@2x4")
    assert planned.mesh is not None and not planned.mesh.assumed
    assert "assumed" not in str(planned)
