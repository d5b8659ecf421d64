"""Which loops of a flat jaxpr are a pair, by what one stacks for the other; and the pair as a planner sees it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.program import compat
from memplan.program.flat import Flat, flatten
from memplan.program.loops.pairs import Pair, loop_of, loop_pairs
from memplan.program.loops.residuals import outer_loops
from memplan.program.trace import trace
from tests.program.scans import STEPS, traced

ROWS = jnp.ones((4, 3))


def pairs(function: Callable[..., Any], *args: Any) -> tuple[Flat, list[Pair]]:
    flat = Flat(flatten(jax.make_jaxpr(function)(*args)))
    return flat, list(loop_pairs(flat))


def stacks(xs: jax.Array, ys: int = 1) -> list[jax.Array]:
    return list(jax.lax.scan(lambda c, x: (c, [jnp.sin(x)] * ys), 0.0, xs)[1])


def reads(*xs: jax.Array, shared: Any = 0.0) -> jax.Array:
    def trip(carry: Any, slices: Any) -> Any:
        return carry + sum(piece.sum() for piece in slices) + jnp.sum(shared), None

    return jax.lax.scan(trip, 0.0, xs)[0]


def test_a_pair_says_which_stack_is_read_as_which() -> None:
    def step(xs: jax.Array) -> jax.Array:
        _, (first, second) = jax.lax.scan(lambda c, x: (c, (jnp.sin(x), jnp.cos(x))), 0.0, xs)
        return reads(xs, second, first)

    flat, (pair,) = pairs(step, ROWS)
    (number,) = pair.backwards
    backward = compat.scan_of(flat.eqns[number])
    assert backward is not None and pair.forward < number
    first = backward.consts + backward.carries
    assert pair.residuals == {0: (first + 2,), 1: (first + 1,)}
    assert pair.operands_of(0) == {first + 2: 0, first + 1: 1}
    body = flat.inner(pair.forward, 0)
    assert not {eqn.primitive.name for eqn in body.eqns} & {"jit", "pjit"}


@pytest.mark.parametrize(
    "step",
    [
        lambda xs: (lambda ys: (reads(*ys), *ys))(stacks(xs)),
        lambda xs: (lambda ys: reads(*ys) + ys[0].sum())(stacks(xs)),
        lambda xs: reads(stacks(xs)[0][:2]),
        lambda xs: (lambda ys: reads(*ys, shared=ys[0]))(stacks(xs)),
        lambda xs: (lambda ys: reads(*ys, *ys))(stacks(xs)),
        lambda xs: reads(jnp.sin(xs)),
    ],
    ids=[
        "returned",
        "read elsewhere",
        "a part of it",
        "also read whole",
        "read twice",
        "not stacked by a loop",
    ],
)
def test_what_others_need_too_is_no_residual(step: Callable[..., Any]) -> None:
    assert pairs(step, ROWS)[1] == []


def test_a_loop_is_in_one_pair_and_takes_the_loop_that_stacks_most_for_it() -> None:
    def step(xs: jax.Array) -> Any:
        single = stacks(xs)
        pair_of_stacks = jax.lax.scan(lambda c, x: (c, (jnp.sin(x), jnp.cos(x))), 0.0, xs)[1]
        return reads(*single, *pair_of_stacks)

    flat, (pair,) = pairs(step, ROWS)
    loops = [number for number, eqn in enumerate(flat.eqns) if compat.scan_of(eqn)]
    assert pair.numbers == (loops[1], loops[2]) and len(pair.residuals) == 2


def test_a_loop_of_layers_needs_what_its_backward_loop_reads() -> None:
    flat = traced("layers")[0].flat
    (pair,) = loop_pairs(flat)
    loop = loop_of(pair, 0, runs=3, pins=())
    assert (loop.trips, loop.runs) == (5, 3)
    assert not loop.needed & loop.available
    # the weights of a layer
    assert {loop.body.values[value].shape for value in loop.available} == {(4, 4)}
    assert all(np.prod(loop.body.values[value].shape) for value in loop.needed)
    assert [loop.body.values[value].shape for value in loop.carried] == [(3, 4)] and loop.reverses


def test_loops_inside_a_loop_count_its_trips() -> None:
    step, args = STEPS["accumulated"]()
    (loop,) = outer_loops(trace(step, args, {}, {}))
    assert (loop.trips, loop.runs) == (5, 4)
