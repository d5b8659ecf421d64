"""`data_parallel`: its arguments, its errors, and training steps on eight CPU devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import memplan
from memplan.errors import MemplanError
from memplan.parallel.step import DataParallel, data_parallel
from tests.parallel.printed import printed_by
from tests.xla.steps import array

SAME = 3e-5  # three times the rounding error of these steps
W = jax.random.normal(jax.random.key(1), (6, 6))
X = jax.random.normal(jax.random.key(0), (24, 6))
FOUR = AbstractMesh((4,), ("d",))
EIGHT = AbstractMesh((2, 4), ("host", "device"))


def step(state: jax.Array, batch: jax.Array) -> jax.Array:
    return state - 0.1 * jax.grad(lambda w: ((batch @ w) ** 2).mean())(state)


def over_four(**options: Any) -> DataParallel:
    return data_parallel(step, FOUR, **options)


def specs(divided: DataParallel, *args: Any) -> list[P]:
    return [sharding.spec for sharding in jax.tree.leaves(divided.shardings(*args))]


def test_shardings_say_what_is_divided() -> None:
    divided = data_parallel(step, FOUR, split_state="m")
    state = {"w": jnp.ones((6, 6)), "m": jnp.ones((6, 8)), "count": 1}
    expected = [P(), P(None, ("d",)), P(), P(("d",), None), P()]
    assert specs(divided, state, (X, jnp.ones(()))) == expected


def test_a_function_may_say_which_state_is_divided() -> None:
    divided = data_parallel(step, EIGHT, split_state=lambda path, leaf: leaf.ndim == 2)
    state = {"odd": jnp.ones((3, 5)), "b": jnp.ones(8), "w": jnp.ones((8, 16))}
    both = "host", "device"
    assert specs(divided, state, X) == [P(), P(), P(None, both), P(both, None)]


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, P(("host", "device"), None, None)),
        ({"batch_axis": 1}, P(None, ("host", "device"), None)),
        ({"space": {"host": "batch", "device": "depth"}}, P(("host",), ("device",), None)),
        ({"space": {"device": 2}}, P(None, None, ("device",))),
        ({"space": {"host": 1, "device": 1}}, P(None, ("host", "device"), None)),
    ],
)
def test_axes_of_the_mesh_divide_dimensions_of_the_batch(options: Any, spec: P) -> None:
    assert specs(data_parallel(step, EIGHT, **options), W, jnp.ones((8, 8, 8))) == [P(), spec]


def test_several_arguments_may_be_divided() -> None:
    divided = data_parallel(step, FOUR, batch_argnums=(0, 2))
    assert specs(divided, X, W, X) == [P(("d",), None), P(), P(("d",), None)]


def test_new_state_has_the_shardings_of_the_old() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        return x.sum(0), {"w": state["w"] + x.sum(), "m": 2 * state["m"]}

    divided = data_parallel(step, FOUR, split_state="m")
    args = {"w": jnp.ones(6), "m": jnp.ones((6, 8))}, X
    eqns = jax.make_jaxpr(divided)(*args).eqns
    constraints = [
        tuple(eqn.params["sharding"].spec)
        for eqn in eqns
        if eqn.primitive.name == "sharding_constraint"
    ]
    expected = [*map(tuple, (P(None, ("d",)), P(), P(("d",), None)))]
    assert constraints == [*expected, *expected[:2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: over_four().shardings(W, X[:6]), r"global batch of 6 \(.*Take 4 or 8"),
        (
            lambda: over_four().shardings(W, X[:3]),
            r"global batch of 3 \(argument 1, .*Take 4, or a mesh",
        ),
        (
            lambda: over_four(space={"d": "depth"}).shardings(W, {"image": X}),
            r"size 6 of dimension 1 of 6 \(argument 1\['image'\], dimension 1\)",
        ),
        (lambda: over_four(space={"e": "depth"}), "divides along 'e'; the mesh has the axes d"),
        (
            lambda: over_four(space={"d": "width"}),
            "divides 'width' along 'd'; it is 'batch', 'depth'",
        ),
        (
            lambda: memplan.parallel.mesh({"a": 4, "b": 400}),
            r"needs 1600 devices; there are \d+ in 1 proc",
        ),
        (lambda: over_four().assemble(X), "an AbstractMesh has no devices"),
        (
            lambda: memplan.jit(over_four()).plan(W, X),
            r"AbstractMesh, which has no devices\. Pass device=",
        ),
    ],
)
def test_bad_input_is_an_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(MemplanError, match=message):
        call()


def test_arguments_may_be_named() -> None:
    def step(
        state: jax.Array, batch: jax.Array, rate: float = 0.1, *, scale: float = 2.0
    ) -> jax.Array:
        return state - rate * scale * (batch @ state).sum(0)

    divided = jax.jit(data_parallel(step, jax.make_mesh((1,), ("device",))))
    named = {"state": W, "batch": X, "scale": 1.0}
    for args, kwargs in [((W,), {"batch": X}), ((W, X), {"rate": 0.5}), ((), named)]:
        np.testing.assert_allclose(divided(*args, **kwargs), step(*args, **kwargs), rtol=1e-5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bacth'"):
        divided(W, bacth=X)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_step_over_a_mesh_is_compiled_for_a_like_mesh_of_described_gpus(axes: AxisType) -> None:
    shapes = array(128, 128), array(256, 128)
    of_eight = AbstractMesh((2, 4), ("host", "device"), axis_types=(axes, axes))
    planned = memplan.jit(data_parallel(step, of_eight), device="h100", topology="2x4").plan(
        *shapes
    )
    memory = planned._outcome.executable.compiled.memory_analysis()
    nbytes = 4 * (2 * 128 * 128 + 256 * 128 // 8)
    assert memory.argument_size_in_bytes + memory.output_size_in_bytes == nbytes
    report = planned.report
    sent = [copy for copy in report.timeline.copies if copy.direction == "to devices"]
    assert len(sent) == sum(row.count for row in report.mesh.collectives) > 0
    rows = {(row.kind, row.over) for row in report.mesh.collectives}
    assert {(copy.kind, copy.over) for copy in sent} == rows
    assert all("test_step.py:" in copy.source for copy in sent)
    assert report.title == report.function == "step"


@pytest.fixture(scope="module")
def on_eight() -> Any:
    """Results of `eight_devices.py`."""
    return printed_by("tests.parallel.eight_devices")


@pytest.mark.slow
def test_eight_devices_train_as_one_does(on_eight: Any) -> None:
    assert max(on_eight["same"].values()) < SAME, on_eight["same"]
    assert max(on_eight["over typed mesh"].values()) < SAME, on_eight["over typed mesh"]


@pytest.mark.slow
def test_a_divided_step_is_planned_as_one_device_runs_it(on_eight: Any) -> None:
    planned = on_eight["planned"]
    assert planned["planner"] == "kernels"
    # XLA:CPU packs tables of pointers more tightly.
    assert all(0 <= excess <= 1024 for excess in planned["counted"])
    assert planned["same baseline"]
    assert planned["within"] <= 1
    assert planned["off"] < SAME


@pytest.mark.slow
def test_numbers_are_compared_with_those_of_the_same_collectives(on_eight: Any) -> None:
    assert on_eight["judged"] == "kernels"


@pytest.mark.slow
def test_each_device_keeps_its_part_of_divided_state(on_eight: Any) -> None:
    assert on_eight["share of split state"] == pytest.approx(1 / 8, rel=0.01)


@pytest.mark.gpu_aot
def test_a_time_limit_is_refused_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = data_parallel(step, AbstractMesh((2,), ("device",)))
    monkeypatch.setattr("memplan.request.processes_of", lambda *_: (0, 1))
    with pytest.raises(memplan.MemplanError, match="time_limit cannot end planning in several"):
        memplan.jit(divided, time_limit=5, device="h100").plan(array(8, 8), array(16, 8))
