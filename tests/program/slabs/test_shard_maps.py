"""Slabs inside of a `shard_map`: the same numbers, of all kinds of equations, chosen and followed like others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from memplan import io
from memplan.errors import PlanMismatchError
from memplan.hardware import catalog
from memplan.planning.slabs.slabs import Slabs
from memplan.program import compat
from memplan.program.candidates import MORE_THAN_ANY
from memplan.program.computations import computation_at, with_computation
from memplan.program.flat import Flat, flatten
from memplan.program.loops.choose import ResidualChoices
from memplan.program.ops import shape_of
from memplan.program.slabs.bands import with_bands
from memplan.program.slabs.choose import SlabChoices
from memplan.program.slabs.write import follow_slabs
from memplan.program.trace import comparable
from memplan.program.transforms import apply_all
from memplan.request import Request, traced
from tests.arrays import assert_equal
from tests.parallel.rings import DEVICES, HEADS, ring_shapes, ring_step, scores_nbytes
from tests.program.slabs.slab_programs import CUTS, Cut, Layer, Step, slab_programs
from tests.program.slabs.test_write import results, wide_and_moved

V100 = catalog.named("v100")


def mapped(step: Step, check_vma: bool) -> tuple[Flat, list[np.ndarray]]:
    """The step in a `shard_map` over one device; the input is divided, the weights are not."""
    _, operands = step.flat_and_operands()
    rows, whole = PartitionSpec("d"), PartitionSpec()

    def body(weights: Any, x: Any) -> Any:
        outputs = step.function(weights, x)
        return jax.tree.map(lambda result: result[None], outputs)

    function = jax.shard_map(
        body,
        mesh=Mesh(np.array(jax.devices()[:1]), ("d",)),
        in_specs=(whole, rows),
        out_specs=rows,
        check_vma=check_vma,
    )
    *weights, x = operands
    return Flat(flatten(jax.make_jaxpr(function)(weights, x))), operands


def check_exact(step: Step, cut: Cut, check_vma: bool) -> None:
    """In slabs, with all that is written on the host too, of a part of it rows on the device."""
    flat, args = mapped(step, check_vma)
    (number,) = (n for n, eqn in enumerate(flat.eqns) if compat.is_shard_map(eqn))
    place = ((number, 0),)
    axis_and_slabs = cut.of(computation_at(flat, place))
    if axis_and_slabs is None:
        return
    bodies = wide_and_moved(*axis_and_slabs)
    programs = [with_computation(flat, place, body) for body in bodies]
    plain, *variants = results([flat.closed, *programs], args)
    for variant in variants:
        assert_equal(variant, plain)


EXACT = slab_programs(exact=True, dtypes=("float32", "float32", "int32"), layers=4)
# an image resized by constant matrices, sums over its rows, running sums along them
_KINDS = ("resize", "norm", "cumulative")
_EACH = Step(
    batch=1, space=(5, 4), features=2,
    layers=tuple(
        Layer(kind, size=3, stride=1, dilation=1, groups=1, features=2, valid=False, back=1)
        for kind in _KINDS
    ),
    loss="product", exact=True, dtype="float32", gradient="weights", seed=0,
)  # fmt: skip
_CUT = Cut(value=0, dim=0, slabs=3, theta=1 << 20, stored=None)


@pytest.mark.parametrize("examples", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_whole_numbers_are_the_same_to_the_bit(examples: int) -> None:
    check = given(EXACT, CUTS, st.booleans())(check_exact)
    settings(max_examples=examples)(example(_EACH, _CUT, True)(check))()


def test_values_of_other_devices_are_no_constants() -> None:
    """Rows that are taken by row numbers are a banded product where those are constants."""
    ring = [(device, (device + 1) % 8) for device in range(8)]

    def primitives(rows: Callable[[], Any]) -> list[str]:
        flat = body_of(lambda x: x[rows()], jnp.ones((128, 4)))
        return [eqn.primitive.name for eqn in with_bands(flat).eqns]

    assert "banded" in primitives(lambda: jnp.arange(32) // 2)
    assert "banded" not in primitives(lambda: lax.ppermute(jnp.arange(32) // 2, "d", ring))


def body_of(function: Callable[..., Any], *args: Any) -> Flat:
    """The body of a function in a `shard_map` over eight devices that divides its arguments."""
    rows = PartitionSpec("d")
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows)
    flat = Flat(flatten(jax.make_jaxpr(mapped)(*args)))
    return computation_at(flat, ((len(flat.eqns) - 1, 0),))


@pytest.mark.gpu_aot
@pytest.mark.parametrize("check_vma", [True, False])
def test_slabs_are_chosen_in_the_scan_of_a_shard_map_and_followed(check_vma: bool) -> None:
    """Scores of ring attention have no value for all queries, and are counted for one device."""
    mesh, tokens = AbstractMesh((DEVICES,), ("d",)), 1024
    limit = 3 * scores_nbytes(tokens)
    step, shapes = ring_step(mesh, check_vma), ring_shapes(mesh, tokens)
    program = traced(step, shapes, {}, {"donate_argnums": 0}, Request(limit, device="v100"))
    residuals = ResidualChoices(program, V100)
    fewest = residuals.fewer(program, 0, MORE_THAN_ANY, False)
    assert fewest is not None
    program = residuals.write(fewest)
    rewritten = next(SlabChoices(program, V100).programs(limit, 0, float("inf"))).write()
    slabs = [record.transform for record in rewritten.in_slabs]
    assert [len(transform.inside) for transform in slabs] == [2, 2]
    for transform in slabs:
        body = computation_at(rewritten.flat, transform.inside)
        sizes = {shape_of(var) for eqn in body.eqns for var in eqn.outvars}
        assert (HEADS, tokens // DEVICES, tokens // DEVICES) not in sizes
    again = apply_all(program, io.decode(tuple[Slabs, ...], io.encode(slabs), complete=True))
    assert comparable(str(again.jaxpr)) == comparable(str(rewritten.jaxpr))
    with pytest.raises(PlanMismatchError):
        follow_slabs(program, replace(slabs[0], inside=(*slabs[0].inside[:1], (0, 0))))
