"""How one equation is divided along an axis: what its operands have to be, what its results are, what is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.parallel.partition.sharded import (
    Gather,
    Partial,
    PerDevice,
    Placement,
    Replicate,
    Shard,
    Sharded,
    ShardedEqn,
    gathers,
    shard_along,
)
from memplan.program.ops import Axes

REPLICATE, PARTIAL, OWN, ROWS, COLUMNS = Replicate(), Partial(), PerDevice(), Shard(0), Shard(1)
PRODUCT = Axes(operands=((0, 1), (1, 2)), results=((0, 2),), reduced={1: "sum"})  # of matrices


@pytest.mark.parametrize(
    ("axis", "needs", "makes"),
    [(0, (ROWS, REPLICATE), ROWS), (2, (REPLICATE, COLUMNS), COLUMNS), (1, (COLUMNS, ROWS), PARTIAL)],
)
def test_a_product_along_each_of_its_axes(axis: int, needs: tuple[Placement, ...], makes: Placement) -> None:
    found = shard_along([REPLICATE, REPLICATE], PRODUCT, axis, 1)
    assert (found.operands, found.results, found.gathered) == (needs, (makes,), ())


def test_an_operand_that_is_split_otherwise_is_gathered() -> None:
    assert shard_along([ROWS, ROWS], PRODUCT, 0, 1).gathered == (1,)
    assert shard_along([COLUMNS, REPLICATE], PRODUCT, 0, 1).gathered == ()  # resharded along its own axis


@pytest.mark.parametrize("how", ["max", "min"])
def test_only_a_sum_has_terms(how: Any) -> None:
    found = shard_along([ROWS], Axes(((0,),), ((),), {0: how}), 0, 1)
    assert found.results == (REPLICATE,)


def test_what_a_sum_is_added_to_counts_once() -> None:
    scattered = Axes(operands=((None,), (0,)), results=((None,),), reduced={0: "sum"}, masked=(0,))
    found = shard_along([REPLICATE, ROWS], scattered, 0, 1)
    assert found.operands == (PARTIAL, ROWS) and found.results == (PARTIAL,)


def test_a_result_without_the_axis_is_whole() -> None:
    found = shard_along([ROWS], Axes(((0, None),), ((0, None), (None,))), 0, 2)
    assert found.results == (ROWS, REPLICATE)


def test_divided_along_nothing_all_is_whole() -> None:
    assert shard_along([ROWS, REPLICATE], None, None, 2) == ShardedEqn(
        (REPLICATE, REPLICATE), (REPLICATE, REPLICATE), gathered=(0,)
    )


def test_estimates_stay_each_devices_own() -> None:
    assert shard_along([OWN, REPLICATE], None, None, 1).results == (OWN,)
    found = shard_along([ROWS, OWN], Axes(((0,), (None,)), ((0,),)), 0, 1)
    assert found.operands == (ROWS, OWN) and found.results == (ROWS,)


def sharded(function: Callable[..., Any], *eqns: ShardedEqn) -> Sharded:
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    return Sharded(jaxpr, (ROWS,), (ROWS,), eqns, {})


def test_gathers_are_told_of_loops_too() -> None:
    body = sharded(jnp.tanh, ShardedEqn((REPLICATE,), (REPLICATE,), gathered=(0,)))
    loop = ShardedEqn((ROWS,), (ROWS,), bodies=(body,))
    found = sharded(
        lambda x: jnp.sin(jax.lax.map(jnp.tanh, x)), loop, ShardedEqn((ROWS,), (ROWS,), axis=0, gathered=(0,))
    )
    inner, outer = body.jaxpr.jaxpr.eqns[0], found.jaxpr.jaxpr.eqns[1]
    assert list(gathers(found)) == [Gather(inner, inner.invars[0], False), Gather(outer, outer.invars[0], True)]


def test_a_placement_equals_only_itself() -> None:
    assert len({Replicate(), Replicate(), Partial(), PerDevice(), Shard(0), Shard(0), Shard(1)}) == 5
