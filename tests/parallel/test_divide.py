"""What lies where: the batch, the state, and outputs that take an argument's place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from memplan.errors import MeshError
from memplan.hardware import catalog
from memplan.parallel.divide import Divided, Options, batch_placement, divide, placements
from memplan.parallel.meshes import links_of
from memplan.parallel.partition.sharded import Replicate, Shard

DEVICES = 4
MESH = AbstractMesh((DEVICES,), ("device",))
WHOLE = Replicate()


def shape(*sides: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, jnp.float32)


def divided(step: Callable[..., Any], *args: Any, **options: Any) -> Divided:
    return divide(step, MESH, links_of(MESH), catalog.named("v100"), Options(**options), args, {})


def test_the_batch_is_split_and_its_scalars_are_whole() -> None:
    options = Options(batch_argnums=(0,), batch_axis=1)
    assert placements([{"x": shape(3, 8), "n": shape(), "v": shape(5)}], {}, options, DEVICES) == [
        WHOLE,
        WHOLE,
        Shard(1),
    ]


def test_what_is_named_is_never_the_batch() -> None:
    assert placements([], {"x": shape(8)}, Options(batch_argnums=(0,)), DEVICES) == [WHOLE]


@pytest.mark.parametrize(("rows", "near"), [(3, "4"), (6, "4 or 8"), (9, "8 or 12")])
def test_batches_near_one_that_cannot_be_divided_are_named(rows: int, near: str) -> None:
    with pytest.raises(MeshError, match=rf"batch of {rows} \(argument 1\['x'\], dimension 0\).*Take {near}, or"):
        batch_placement(1, "['x']", shape(rows, 2), Options(), DEVICES)


@pytest.mark.parametrize(
    ("sides", "placement"),
    [((4, 8), Shard(1)), ((8, 4), Shard(0)), ((9, 4), Shard(1)), ((6, 6), WHOLE), ((), WHOLE), ((0, 4), Shard(1))],
)
def test_state_is_split_along_its_largest_dimension_that_can_be(sides: tuple[int, ...], placement: Any) -> None:
    assert placements([shape(*sides)], {}, Options(split_state=""), DEVICES) == [placement]


def test_a_function_may_say_which_state_is_split() -> None:
    options = Options(split_state=lambda name, leaf: name == "['m']" and leaf.shape[0] > 4)
    assert placements([{"m": shape(8), "w": shape(8)}], {}, options, DEVICES) == [Shard(0), WHOLE]
    assert placements([{"m": shape(4)}], {}, options, DEVICES) == [WHOLE]
    assert placements([{"m": shape(8)}], {}, options, 1) == [WHOLE]


def test_an_output_in_an_arguments_place_lies_as_it_does_and_others_as_they_come() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        return {"w": state["w"] - x.T @ x, "m": 0.9 * state["m"] + x.T @ x}, x + 1, x.sum()

    found = divided(step, {"m": shape(8, 8), "w": shape(8, 8)}, shape(16, 8), split_state="m")
    assert found.sharded.inputs == (Shard(0), WHOLE, Shard(0))
    assert found.sharded.outputs == (Shard(0), WHOLE, Shard(0), WHOLE)
    assert jax.tree.unflatten(found.out_tree, found.sharded.outputs)[0] == {"m": Shard(0), "w": WHOLE}


def test_a_gather_for_want_of_a_rule_is_a_warning_with_its_line() -> None:
    def step(state: jax.Array, x: jax.Array) -> Any:
        return state + jnp.sort(x, axis=0).sum()

    with pytest.warns(
        UserWarning, match=r"sort at .*test_divide\.py:\d+ cannot be divided .* float32\[8,2\] and computes all"
    ):
        divided(step, shape(), shape(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided(lambda state, x: state + x.sum(), shape(), shape(8, 2))
