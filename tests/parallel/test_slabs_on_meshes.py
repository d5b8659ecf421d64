"""Slabs of a step over a mesh run along undivided dimensions, and count one device's bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from memplan.hardware import catalog
from memplan.program.slabs.choose import SlabChoices
from memplan.program.trace import Program, trace
from memplan.xla.target import Target
from tests.parallel.printed import printed_by
from tests.parallel.slabbed import SHARES, step

V100 = catalog.named("v100")
ABSENT = Target(V100, described=True).absent
MESH = AbstractMesh((4,), ("device",), axis_types=(AxisType.Auto,))


def dims_of_slabs(program: Program, nbytes: int) -> set[int]:
    candidates = SlabChoices(program, V100).programs(nbytes, 0, float("inf"))
    return {candidate.write().in_slabs[0].transform.dim for candidate in candidates}


@pytest.mark.parametrize(
    "divided", [*(pytest.param(dim, marks=pytest.mark.slow) for dim in (1, 2)), 3]
)
def test_the_divided_dimension_is_never_cut(divided: int) -> None:
    spec = PartitionSpec(*("device" if dim == divided else None for dim in range(5)))
    x = jax.ShapeDtypeStruct((1, 64, 64, 64, 1), jnp.float32, sharding=NamedSharding(MESH, spec))
    weights = [jax.ShapeDtypeStruct((3, 3, 3, a, 8), jnp.float32) for a in (1, 8, 8)]
    program = trace(step, (weights, x), {}, {}, absent=ABSENT)
    limit = 64**3 * 8 * 4  # of one large array, of which a device has a quarter
    dims = dims_of_slabs(program, limit)
    assert dims and dims <= {1, 2, 3} - {divided}
    best = next(SlabChoices(program, V100).programs(limit, 0, float("inf")))
    assert best.expected_bytes <= limit  # of one device


def test_nor_is_a_dimension_that_a_constraint_divides() -> None:
    def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, rows)
        for weight in weights:
            x = jax.nn.relu(x @ weight)
        return (x**2).mean()

    rows = NamedSharding(MESH, PartitionSpec("device"))
    x = jax.ShapeDtypeStruct((4096, 4), jnp.float32, sharding=rows)
    weights = [jax.ShapeDtypeStruct((size, 64), jnp.float32) for size in (4, 64, 64)]
    program = trace(jax.value_and_grad(loss_of), (weights, x), {}, {}, absent=ABSENT)
    assert dims_of_slabs(program, 4096 * 64 * 4) == {1}  # of the width, not of the batch


@pytest.mark.slow
def test_slabs_on_four_devices_give_the_results_of_one() -> None:
    for share, row in zip(SHARES, printed_by("tests.parallel.slabbed"), strict=True):
        assert row["share"] <= share and row["loops"] and row["off"] < 1e-6
        assert row["kinds"] == ["all-reduce", "collective-permute"]  # and nothing is gathered
