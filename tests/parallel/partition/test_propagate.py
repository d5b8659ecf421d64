"""Propagation on equations alone, in milliseconds: what is split, what is summed and where, what is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan.parallel.partition.propagate import propagate
from memplan.parallel.partition.sharded import (
    OutputDemand,
    Partial,
    PerDevice,
    Placement,
    Replicate,
    Shard,
    Sharded,
    ShardedEqn,
    gathers,
)
from memplan.program.flat import flatten

DEVICES = 4
REPLICATE, PARTIAL, ROWS, COLUMNS = Replicate(), Partial(), Shard(0), Shard(1)


def sharded(
    function: Callable[..., Any],
    *inputs: tuple[tuple[int, ...], Placement],
    outputs: OutputDemand | None = None,
    own_statistics: bool = False,
) -> Sharded:
    """Of a function of float32 arrays with these shapes and placements; all outputs are asked for alike."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in inputs]
    flat = flatten(jax.make_jaxpr(function)(*shapes))
    asked = [outputs or OutputDemand()] * len(flat.jaxpr.outvars)
    return propagate(flat, [placement for _, placement in inputs], asked, DEVICES, own_statistics)


def named(found: Sharded, name: str) -> ShardedEqn:
    """How its first equation of this primitive is divided."""
    eqns = zip(found.jaxpr.jaxpr.eqns, found.eqns, strict=True)
    return next(one for eqn, one in eqns if eqn.primitive.name == name)


def reduced(found: Sharded) -> list[tuple[str, Placement]]:
    """The primitives that made what is summed or averaged, and the placement of the result."""
    eqns = found.jaxpr.jaxpr.eqns
    makers = {var: eqn.primitive.name for eqn in eqns for var in eqn.outvars}
    return [(makers[var], placement) for var, placement in found.reductions.items()]


X, W = ((8, 4), ROWS), ((4, 4), REPLICATE)


def test_rows_stay_with_their_device() -> None:
    found = sharded(lambda x, w: jnp.tanh(x @ w) + x, X, W)
    assert found.outputs == (ROWS,) and not found.reductions and not list(gathers(found))
    assert named(found, "dot_general").operands == (ROWS, REPLICATE)


@pytest.mark.parametrize(
    ("function", "maker"),
    [
        (lambda x, w: x.sum(0), "reduce_sum"),
        (lambda x, w: 0.1 * x.sum(0), "mul"),  # linear: a term each, still
        (lambda x, w: x.sum(0) @ w, "reduce_sum"),
        (lambda x, w: jnp.tanh(x.sum(0)), "reduce_sum"),
        (lambda x, w: x.sum(0) ** 2, "reduce_sum"),
        (lambda x, w: x.T @ x, "dot_general"),
    ],
)
def test_terms_are_summed_as_late_as_can_be_and_once(function: Callable[..., Any], maker: str) -> None:
    found = sharded(function, X, W)
    assert reduced(found) == [(maker, REPLICATE)] and found.outputs == (REPLICATE,)


def test_an_output_may_stay_partial_if_that_is_allowed() -> None:
    found = sharded(lambda x: x.sum(0), X, outputs=OutputDemand(may_be_partial=True))
    assert found.outputs == (PARTIAL,) and not found.reductions


def test_what_two_read_is_summed_before_they_do() -> None:
    found = sharded(lambda x: (lambda total: (2 * total, 3 * total))(x.sum(0)), X)
    assert reduced(found) == [("reduce_sum", REPLICATE)]


def test_a_maximum_is_not_a_sum() -> None:
    found = sharded(lambda x: x.max(0), X)
    assert found.outputs == (REPLICATE,) and not found.reductions and named(found, "reduce_max").axis is not None


def test_a_gradient_that_updates_divided_state_is_scattered() -> None:
    found = sharded(lambda x, m: 0.9 * m + x.T @ x, X, ((4, 4), COLUMNS), outputs=OutputDemand(COLUMNS))
    assert [placement for _, placement in reduced(found)] == [COLUMNS]


def test_a_broadcast_is_made_in_the_parts_that_its_readers_want() -> None:
    found = sharded(lambda x, b: x * jnp.broadcast_to(jnp.tanh(b), x.shape), X, ((4,), REPLICATE))
    assert named(found, "broadcast_in_dim").results == (ROWS,)


def test_the_largest_operand_says_how_an_equation_is_divided() -> None:
    found = sharded(lambda a, b: a @ b, ((8, 64), ROWS), ((64, 4), COLUMNS))
    assert found.outputs == (ROWS,) and [one.operand.aval.shape for one in gathers(found)] == [(64, 4)]


def test_what_the_devices_do_not_divide_is_gathered() -> None:
    found = sharded(lambda x: x.reshape(2, 16), X)
    assert [one.eqn.primitive.name for one in gathers(found)] == ["reshape"]


def test_without_a_rule_all_make_the_whole_and_read_their_parts_of_it() -> None:
    found = sharded(lambda x: jnp.tanh(jnp.sort(x, axis=0)), X)
    (gather,) = gathers(found)
    assert gather.eqn.primitive.name == "sort" and not gather.divides
    assert named(found, "sort").replicated and named(found, "sort").results == (ROWS,)
    assert named(found, "tanh").operands == (ROWS,) and found.outputs == (ROWS,)


# Statistics of each device's own.


def centred(x: jax.Array) -> jax.Array:
    return x - x.mean(0)


def test_statistics_of_the_whole_batch_are_summed_before_they_are_used() -> None:
    assert [placement for _, placement in reduced(sharded(centred, X))] == [REPLICATE]


def test_statistics_of_each_devices_own_need_no_sum() -> None:
    found = sharded(centred, X, own_statistics=True)
    assert not found.reductions and PerDevice() in named(found, "sub").operands and found.outputs == (ROWS,)


def test_a_running_mean_is_averaged_once_at_its_end() -> None:
    def step(x: jax.Array, running: jax.Array) -> Any:
        mean = x.mean(0)
        return x - mean, 0.9 * running + 0.1 * mean

    found = sharded(step, X, ((4,), REPLICATE), own_statistics=True)
    assert [placement for _, placement in reduced(found)] == [REPLICATE]
    assert found.outputs == (ROWS, REPLICATE)


# Loops and conditionals.


def test_a_scan_adds_up_terms_that_are_summed_once_behind_it() -> None:
    def total(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, part: (carry + part.sum(0), None), x[0].sum(0), x[1:])[0]

    found = sharded(total, ((3, 8, 4), COLUMNS))
    assert reduced(found) == [("scan", REPLICATE)]
    assert not named(found, "scan").bodies[0].reductions


def test_a_scan_whose_trips_need_the_sum_has_it_in_each() -> None:
    def total(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, part: (jnp.tanh(carry + part.sum(0)), None), jnp.zeros(4), x)[0]

    found = sharded(total, ((3, 8, 4), COLUMNS))
    assert not found.reductions and len(named(found, "scan").bodies[0].reductions) == 1


def test_trips_that_know_nothing_of_one_another_are_divided() -> None:
    found = sharded(lambda x: jax.lax.map(jnp.tanh, x), X)
    assert named(found, "scan").divides_trips and found.outputs == (ROWS,)


def test_a_while_loop_keeps_its_carry_split_and_its_test_whole() -> None:
    def halve(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x / 2, x)

    found = sharded(halve, X)
    test, body = named(found, "while").bodies
    assert found.outputs == body.outputs == (ROWS,) and test.outputs == (REPLICATE,)


def test_branches_agree() -> None:
    def either(x: jax.Array, flag: jax.Array) -> jax.Array:
        return jax.lax.cond(flag > 0, jnp.tanh, lambda x: jnp.sort(x, axis=0) + jnp.zeros_like(x), x)

    found = sharded(either, X, ((), REPLICATE))
    assert found.outputs == (ROWS,)
    assert {body.outputs for body in named(found, "cond").bodies} == {(ROWS,)}
