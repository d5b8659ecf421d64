"""Steps that are one shard_map: what one device runs of them, and back over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from memplan.program.sharding import Spmd, unwrap_shard_map

AUTO = (AxisType.Auto, AxisType.Auto)
MESH = AbstractMesh((2, 4), ("host", "device"), axis_types=AUTO)
WHOLE, BATCH = PartitionSpec(), PartitionSpec(("host", "device"))
X, W = jax.ShapeDtypeStruct((16, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3), jnp.float32)


def local(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.psum((x @ w).sum(), ("host", "device")), x + 1


def mapped(**options: Any) -> Callable[..., Any]:
    given = {"mesh": MESH, "in_specs": (WHOLE, BATCH), "out_specs": (WHOLE, BATCH), "check_vma": False}
    return jax.shard_map(local, **{**given, **options})


def test_what_one_device_runs_has_the_shapes_of_its_part() -> None:
    found = unwrap_shard_map(jax.make_jaxpr(mapped())(W, X))
    assert found is not None
    spmd, traced = found
    assert spmd.axes == {"host": 2, "device": 4} and list(spmd.axes) == ["host", "device"]
    assert (spmd.inputs, spmd.outputs) == ((WHOLE, BATCH), (WHOLE, BATCH))
    assert [aval.shape for aval in traced.in_avals] == [(3, 3), (2, 3)]
    assert [aval.shape for aval in traced.out_avals] == [(), (2, 3)]


def test_inputs_that_it_does_not_read_and_literal_outputs_are_whole() -> None:
    step = mapped()
    found = unwrap_shard_map(jax.make_jaxpr(lambda x, unread, w: (*step(w, x), x, 3.0))(X, X, W))
    assert found is not None
    spmd, traced = found
    assert spmd.inputs == (BATCH, WHOLE, WHOLE) and spmd.outputs == (WHOLE, BATCH, BATCH, WHOLE)
    assert [aval.shape for aval in traced.in_avals] == [(2, 3), (16, 3), (3, 3)]


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x: (x @ w).sum(),
        lambda w, x: mapped()(w, x + 1),
        lambda w, x: (*mapped()(jnp.eye(3), x), w),
        mapped(check_vma=True),
        jax.shard_map(lambda w, x: w, mesh=MESH, in_specs=WHOLE, out_specs=WHOLE, axis_names={"host"}, check_vma=False),
    ],
    ids=["none", "one among others", "an output that it does not know", "with types over the mesh", "over one axis"],
)
def test_any_other_step_is_left_alone(step: Callable[..., Any]) -> None:
    assert unwrap_shard_map(jax.make_jaxpr(step)(W, X)) is None


def test_over_a_mesh_it_computes_of_whole_arrays() -> None:
    mesh = jax.make_mesh((1, 1), ("host", "device"), axis_types=AUTO)
    spmd = Spmd(MESH, (WHOLE, BATCH), (WHOLE, BATCH)).on(mesh)
    w, x = jnp.eye(3), jnp.ones((4, 3))
    total, more = jax.jit(spmd.over_mesh(local))(w, x)
    np.testing.assert_allclose(total, 12)
    np.testing.assert_allclose(more, x + 1)
    assert spmd.sharding(BATCH).mesh == mesh
