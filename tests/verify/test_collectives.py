from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import memplan
from memplan import parallel
from memplan.program import compat
from memplan.program.sharding import unwrap_shard_map
from memplan.verify.collectives import collective_differences
from memplan.xla.collective_cost import Collective
from models.train import resnet_step

MESH = AbstractMesh((2, 4), ("host", "device"))
SIZES = {"host": 2, "device": 4}


def one_device(step: Any, *shapes: Any) -> compat.ClosedJaxpr:
    whole = PartitionSpec()
    divided = jax.shard_map(step, mesh=MESH, in_specs=whole, out_specs=whole, check_vma=False)
    found = unwrap_shard_map(jax.make_jaxpr(divided)(*shapes))
    assert found is not None
    return found[1]


def in_phases(x: jax.Array) -> jax.Array:
    part = jax.lax.psum_scatter(x, "device", tiled=True)
    return jax.lax.all_gather(jax.lax.psum(part, "host"), "device", tiled=True)


def test_what_the_program_says_is_counted_by_axes_and_bytes() -> None:
    jaxpr = one_device(in_phases, jax.ShapeDtypeStruct((64,), jnp.float32))
    found = {
        Collective("reduce-scatter", ("device",), 256): 1,
        Collective("all-reduce", ("host",), 64): 1,
        Collective("all-gather", ("device",), 256): 1,
    }
    assert collective_differences(jaxpr, SIZES, found) == ()
    flat = {Collective("all-reduce", ("host", "device"), 256): 1}
    told = collective_differences(jaxpr, SIZES, flat)
    assert len(told) == 4
    assert "all-reduce(host,device) of 256 bytes runs 1 times instead of 0" in told


def test_collectives_in_a_loop_run_once_a_trip() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, _: (jax.lax.psum(total, "host"), None), x, None, length=3)[0]

    jaxpr = one_device(step, jax.ShapeDtypeStruct((4,), jnp.float32))
    assert collective_differences(jaxpr, SIZES, {Collective("all-reduce", ("host",), 16): 3}) == ()


def test_an_axis_of_one_device_has_no_collectives() -> None:
    jaxpr = one_device(in_phases, jax.ShapeDtypeStruct((64,), jnp.float32))
    assert collective_differences(jaxpr, {"host": 1, "device": 1}, {}) == ()


@pytest.mark.gpu_aot
@pytest.mark.slow
def test_a_step_for_eight_absent_gpus_has_the_collectives_that_it_was_written_with() -> None:
    step, (state, batch) = resnet_step(64, 64, depth=14)
    divided = parallel.data_parallel(step, MESH, topology="ddl@2x4", device="v100")
    names = tuple(SIZES)
    planned = memplan.jit(divided, device="v100", donate_argnums=0).plan(state, batch)
    assert planned._found.unexpected_collectives == ()
    collectives = planned._found.planned.result.replay.collectives
    assert {one.axes for one in collectives} <= {("host",), ("device",), names}
    assert sum(collectives.values()) >= len(divided.sums)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_step_over_a_mesh_is_compiled_for_a_like_mesh_of_described_gpus(axes: AxisType) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    shapes = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)
    mesh = AbstractMesh((2, 4), ("host", "device"), axis_types=(axes, axes))
    divided = parallel.data_parallel(step, mesh, topology="today@2x4", device="h100")
    planned = memplan.jit(divided, device="h100").plan(*shapes)
    memory = planned._found.executable.compiled.memory_analysis()
    nbytes = 4 * (2 * 128 * 128 + 256 * 128 // 8)
    assert memory.argument_size_in_bytes + memory.output_size_in_bytes == nbytes
