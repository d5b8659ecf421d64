"""Computations inside of a program: all are found, with what is around them, and can be replaced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from memplan.program import compat
from memplan.program.computations import (
    PlacedComputation,
    computation_at,
    computations,
    with_computation,
)
from memplan.program.flat import Flat, flatten
from tests.arrays import assert_equal
from tests.within import WITHIN

WEIGHTS, X = jnp.full((4, 4), 0.5), jnp.ones((8, 4))
MESH = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))


def step(weights: jax.Array, x: jax.Array) -> Any:
    loss, gradient = jax.value_and_grad(lambda weights: jnp.tanh(x @ weights).sum())(weights)
    return weights - 0.1 * gradient, loss


def counted(weights: jax.Array, x: jax.Array) -> Any:
    """In a `while_loop`, whose trips are not known."""
    return jax.lax.while_loop(
        lambda state: state[1] < 9.0,
        lambda state: (state[0], step(state[0], x)[1] + 9.0),
        (weights, 0.0),
    )


def mapped(step: Any, mesh: AbstractMesh = MESH) -> Callable[..., Any]:
    """In a `shard_map` over one axis of a mesh, that divides the rows of x."""
    rows, whole = PartitionSpec("d"), PartitionSpec()

    def body(weights: jax.Array, x: jax.Array) -> Any:
        weights, loss = step(weights, x)
        return weights, loss[None]

    return jax.shard_map(
        body,
        mesh=mesh,
        axis_names={"d"},
        in_specs=(whole, rows),
        out_specs=(whole, rows),
        check_vma=False,
    )


def flat_of(function: Callable[..., Any]) -> Flat:
    return Flat(flatten(jax.make_jaxpr(function)(WEIGHTS, X)))


def depth_and_nbytes(computation: PlacedComputation) -> tuple[int, int]:
    return len(computation.place), computation.kernel_nbytes


def placed_in(flat: Flat, *overwritable: Any) -> list[PlacedComputation]:
    return list(computations(PlacedComputation((), flat, 1, 0, {}, frozenset(overwritable))))


@pytest.mark.parametrize(
    ("function", "trips"),
    [
        (step, [1]),
        (counted, [1, 1]),
        (WITHIN["branch"](step), [1, 1, 1]),
        (WITHIN["body"](step), [1, 3]),
        (WITHIN["body, branch, body"](step), [1, 3, 3, 3, 9]),
    ],
)
def test_all_are_found(function: Callable[..., Any], trips: list[int]) -> None:
    flat = flat_of(function)
    placed = placed_in(flat)
    assert sorted(computation.trips for computation in placed) == trips
    for computation in placed:
        assert computation_at(flat, computation.place).eqns == computation.flat.eqns
    assert max(map(depth_and_nbytes, placed))[1] == (8 * 4 * 2 + 4 * 4) * 4


@pytest.mark.parametrize("function", [counted, *(within(step) for within in WITHIN.values())])
def test_one_is_replaced(function: Callable[..., Any]) -> None:
    """By itself, nothing changes; where all it makes is doubled, the results do."""
    flat = flat_of(function)
    innermost = max(placed_in(flat), key=depth_and_nbytes)
    plain = compat.jaxpr_as_fun(flat.closed)(WEIGHTS, X)
    same = with_computation(flat, innermost.place, innermost.flat.closed)
    body = compat.jaxpr_as_fun(innermost.flat.closed)
    doubled_body = innermost.flat.retraced(lambda *xs: [2 * result for result in body(*xs)])
    doubled = with_computation(flat, innermost.place, doubled_body)
    assert_equal(jax.jit(compat.jaxpr_as_fun(same))(WEIGHTS, X), plain)
    twice = jax.jit(compat.jaxpr_as_fun(doubled))(WEIGHTS, X)
    assert not all(map(jnp.array_equal, twice, plain))


def test_what_is_around_a_computation_is_counted_once() -> None:
    def function(weights: jax.Array, x: jax.Array) -> Any:
        hidden = x @ weights  # read behind the loop
        total = (x @ weights.T).sum()

        def trip(carry: jax.Array, row: jax.Array) -> Any:
            return carry + row @ weights, jnp.tanh(row)

        return *jax.lax.scan(trip, x[0] + total, x), hidden

    (_, body) = placed_in(flat_of(function))
    hidden, carried, stack, row, body_result = 8 * 4, 4, 8 * 4, 4, 4
    assert body.trips == 8
    assert body.around_nbytes == 4 * (hidden + carried + stack + row + body_result)


def test_bodies_of_shard_maps_are_for_one_device() -> None:
    """Its part of the rows, in the body and in a scan inside; what is around counts its part, too."""

    def function(weights: jax.Array, x: jax.Array) -> Any:
        hidden = x @ weights  # read behind the `shard_map`
        return mapped(WITHIN["body"](step))(weights, x), hidden

    flat = flat_of(function)
    (_, x), hidden = flat.invars, flat.eqns[0].outvars[0]
    placed = [
        list(computations(PlacedComputation((), flat, 1, 0, parts, frozenset())))
        for parts in ({}, {x: (2, 1), hidden: (2, 1)})
    ]
    for whole, body, inner in placed:
        assert (whole.trips, body.trips, inner.trips) == (1, 1, 3)
        assert not body.parts
        assert inner.kernel_nbytes == (4 * 4 * 2 + 4 * 4) * 4
    undivided, divided = (body.around_nbytes for _, body, _ in placed)
    assert undivided - divided == compat.nbytes_of(hidden.aval) // 2


def test_bodies_that_xla_divides_further_are_left_out() -> None:
    further = AbstractMesh((2, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    assert len(placed_in(flat_of(mapped(step)))) == 2
    assert len(placed_in(flat_of(mapped(step, further)))) == 1


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_results_are_written_over_what_ends(within: Callable[..., Any]) -> None:
    """The new weights of any depth are in the place of the donated ones, or of those that a loop carries."""
    flat = flat_of(within(step))
    kept, donated = (
        max(placed_in(flat, *overwritable), key=lambda computation: len(computation.place))
        for overwritable in ((), flat.invars[:1])
    )
    assert kept.around_nbytes - donated.around_nbytes == compat.nbytes_of(WEIGHTS)


def test_there_is_none_where_none_was_said() -> None:
    flat = flat_of(WITHIN["branch"](step))
    for place in (((0, 0),), ((99, 0),), ((len(flat.eqns) - 1, 2),)):
        with pytest.raises(LookupError):
            computation_at(flat, place)
