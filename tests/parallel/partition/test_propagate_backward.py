"""The backward pass of propagation: what the readers of every array ask for, on tiny steps that nobody divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from memplan.parallel.partition.propagate import demands, per_device
from memplan.parallel.partition.sharded import OutputDemand, Placement, Replicate, Shard, Sharded, ShardedEqn

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
DEVICES = 4


def undivided(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Sharded:
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    eqns = tuple(
        ShardedEqn((WHOLE,) * len(eqn.invars), (WHOLE,) * len(eqn.outvars), replicated=True) for eqn in jaxpr.jaxpr.eqns
    )
    return Sharded(jaxpr, (WHOLE,) * len(shapes), (WHOLE,) * len(jaxpr.jaxpr.outvars), eqns, {})


def with_placements(
    known: Sharded, number: int, operands: Sequence[Placement], results: Sequence[Placement]
) -> Sharded:
    """One equation divided, as somebody did."""
    eqns = list(known.eqns)
    eqns[number] = ShardedEqn(tuple(operands), tuple(results), axis=0)
    return replace(known, eqns=tuple(eqns))


def asked(*placements: Placement | None) -> list[OutputDemand]:
    return [OutputDemand(placement) for placement in placements]


def test_what_an_output_should_be_is_asked_of_all_that_makes_it() -> None:
    known = undivided(lambda x: jnp.sin(jnp.tanh(x)), (8, 4))
    found = demands(known, asked(ROWS), DEVICES)
    variables = [*known.jaxpr.jaxpr.invars, *(eqn.outvars[0] for eqn in known.jaxpr.jaxpr.eqns)]
    assert found.unanimous == found.majority == dict.fromkeys(variables, ROWS)


def test_a_transpose_asks_for_the_other_dimension() -> None:
    known = undivided(lambda x: x.T, (8, 4))
    assert demands(known, asked(ROWS), DEVICES).unanimous[known.jaxpr.jaxpr.invars[0]] == COLUMNS


def test_of_an_output_that_may_be_anything_nothing_is_asked() -> None:
    known = undivided(jnp.sin, (8, 4))
    found = demands(known, asked(None), DEVICES)
    assert found.unanimous == found.majority == {}


def test_an_axis_that_the_devices_do_not_divide_is_not_asked_for_further_up() -> None:
    known = undivided(jnp.sin, (6, 4))
    assert list(demands(known, asked(ROWS), DEVICES).unanimous) == known.jaxpr.jaxpr.outvars


def test_what_has_no_rule_passes_nothing_on() -> None:
    known = undivided(lambda x: jnp.linalg.cholesky(x, symmetrize_input=False), (8, 8))
    assert known.jaxpr.jaxpr.invars[0] not in demands(known, asked(ROWS), DEVICES).majority


def test_readers_that_disagree_have_a_majority_alone() -> None:
    known = undivided(lambda x: (jnp.sin(x), jnp.cos(x), jnp.tanh(x), jnp.exp(x)), (8, 4))
    (x,) = known.jaxpr.jaxpr.invars
    found = demands(known, asked(ROWS, COLUMNS, COLUMNS, None), DEVICES)
    assert x not in found.unanimous and found.majority[x] == COLUMNS
    split = demands(known, asked(COLUMNS, COLUMNS, COLUMNS, ROWS), DEVICES)  # the last equation asks first
    assert x not in split.unanimous and split.majority[x] == COLUMNS


def test_a_divided_equation_asks_for_what_it_reads_and_not_for_what_is_asked_of_it() -> None:
    known = with_placements(undivided(jnp.sin, (8, 4)), 0, [COLUMNS], [COLUMNS])
    assert demands(known, asked(ROWS), DEVICES).unanimous[known.jaxpr.jaxpr.invars[0]] == COLUMNS


def centred(x: jax.Array) -> jax.Array:
    return x - jax.lax.reduce_sum(x, (0,))


def test_statistics_that_go_back_into_what_is_split_are_each_devices_own() -> None:
    known = undivided(centred, (8, 4))
    names = [eqn.primitive.name for eqn in known.jaxpr.jaxpr.eqns]
    known = with_placements(known, names.index("reduce_sum"), [ROWS], [WHOLE])
    known = with_placements(known, names.index("sub"), [ROWS, WHOLE], [ROWS])
    assert per_device(known) == frozenset(range(len(names)))


def test_a_sum_that_only_the_result_shows_is_not() -> None:
    known = undivided(lambda x: (jnp.sin(x), jax.lax.reduce_sum(x, (0,))), (8, 4))
    known = with_placements(known, 0, [ROWS], [ROWS])
    assert per_device(with_placements(known, 1, [ROWS], [WHOLE])) == {0}


def test_loops_are_left_out() -> None:
    known = undivided(lambda x: jax.lax.map(jnp.tanh, x), (8, 4))
    body = undivided(jnp.tanh, (4,))
    loop = ShardedEqn((ROWS,), (ROWS,), bodies=(body,))
    assert per_device(replace(known, eqns=(loop,))) == frozenset()
