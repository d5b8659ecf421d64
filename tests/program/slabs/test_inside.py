"""Slabs inside of branches and bodies: the same numbers, chosen where the largest kernels are, followed from a plan."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memplan import io
from memplan.errors import PlanMismatchError
from memplan.hardware import catalog
from memplan.hardware.backend import CPU
from memplan.planning.slabs.slabs import Slabs
from memplan.program.computations import PlacedComputation, computations
from memplan.program.lowerable import lowerable
from memplan.program.slabs.choose import SlabChoices
from memplan.program.slabs.write import follow_slabs
from memplan.program.trace import Program, comparable, trace
from memplan.program.transforms import apply_all
from tests import vocabulary
from tests.arrays import assert_close
from tests.program.scans import QUICK
from tests.within import WITHIN, Step, in_a_body, in_a_branch

TOKENS, V100 = 128, catalog.named("v100")
LOGITS_BYTES = 4 * TOKENS * vocabulary.WORDS


def step(weights: Any, x: jax.Array) -> Any:
    return vocabulary.step(weights, x, jnp.arange(TOKENS) % vocabulary.WORDS)


def two_branches(step: Step) -> Step:
    """Both are a training step, as where two optimizers take turns."""

    def other(weights: Any, x: jax.Array) -> Any:
        return step(weights, 2 * x)

    return lambda weights, x: jax.lax.cond(x[0, 0] > 9.0, step, other, weights, x)


def counted(step: Step) -> Step:
    """Two trips of a `while_loop`, by a bound that is not known before."""

    def wrapped(weights: Any, x: jax.Array) -> Any:
        bound = jnp.where(x[0, 0] < 9.0, 2, 0)
        return jax.lax.fori_loop(
            0, bound, lambda _, state: step(state[0], x), (weights, jnp.float32(0))
        )

    return wrapped


def around(step: Step) -> Step:
    """A step, and three in a loop."""

    def wrapped(weights: Any, x: jax.Array) -> Any:
        weights, losses = in_a_body(step)(weights, x)
        weights, loss = step(weights, x)
        return weights, losses.sum() + loss

    return wrapped


PLACES: dict[str, tuple[Callable[[Step], Step], int]] = {
    **{name: (within, 1) for name, within in WITHIN.items()},
    "both branches": (two_branches, 2),
    "while": (counted, 1),
    "scan of two branches": (lambda step: in_a_body(two_branches(step)), 2),
    "beside a scan": (around, 2),
    "beside a scan, in a branch": (lambda step: in_a_branch(around(step)), 2),
}
SIMPLER = ("body", "both branches", "beside a scan")  # a part of another place each


def traced(name: str) -> Program:
    weights, x, _ = vocabulary.shapes(TOKENS)
    return trace(PLACES[name][0](step), (weights, x), {}, {"donate_argnums": 0})


@functools.cache
def rewritten_of(name: str) -> tuple[Program, Program]:
    """A program, and the same in slabs."""
    program = traced(name)
    return program, in_slabs(program)


def in_slabs(program: Program) -> Program:
    """Within what its arguments, gradients and a tenth of its logits take."""
    room = sum(program.input_nbytes) * 2 + 2 * LOGITS_BYTES
    return next(SlabChoices(program, V100).programs(room, 0, float("inf"))).write()


def numbers(program: Program) -> Any:
    weights, x, _ = vocabulary.arguments(TOKENS)
    return jax.jit(lowerable(program, backend=CPU).step, compiler_options=QUICK)(weights, x)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SIMPLER)) for name in PLACES],
)
def test_the_numbers_are_the_same(name: str) -> None:
    program, rewritten = rewritten_of(name)
    assert len(rewritten.in_slabs) == PLACES[name][1]
    assert all(bool(record.transform.inside) == bool(record.where) for record in rewritten.in_slabs)
    loops = list[int]()
    for record in rewritten.in_slabs:
        loops += range(record.first, record.first + len(record.loops))
    assert loops == list(range(1, len(loops) + 1))
    assert_close(numbers(rewritten), numbers(program), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", PLACES)
def test_no_array_of_a_split_computation_has_all_tokens(name: str) -> None:
    _, rewritten = rewritten_of(name)
    places = {record.transform.inside for record in rewritten.in_slabs}
    for computation in computations(PlacedComputation((), rewritten.flat, 1, 0, {}, frozenset())):
        if any(computation.place[: len(place)] == place for place in places):
            shapes = {var.aval.shape for eqn in computation.flat.eqns for var in eqn.outvars}
            assert (TOKENS, vocabulary.WORDS) not in shapes


@pytest.mark.parametrize("name", PLACES)
def test_a_plan_is_followed(name: str) -> None:
    program, rewritten = rewritten_of(name)
    saved = io.encode([record.transform for record in rewritten.in_slabs])
    slabs = io.decode(tuple[Slabs, ...], saved, complete=True)
    assert slabs == tuple(record.transform for record in rewritten.in_slabs)
    again = apply_all(program, slabs)
    assert comparable(str(again.jaxpr)) == comparable(str(rewritten.jaxpr))
    for place in (((0, 7),), (*slabs[0].inside, (0, 0)), ((999, 0),)):
        with pytest.raises(PlanMismatchError):
            follow_slabs(program, replace(slabs[0], inside=place))


def test_a_computation_whose_kernels_are_small_is_left_alone() -> None:
    def both(weights: Any, x: jax.Array) -> Any:
        small = jax.lax.scan(
            lambda carry, _: (jnp.tanh(carry @ weights[0]), None), x[:4], length=3
        )[0]
        return step(weights, x + small.sum())

    weights, x, _ = vocabulary.shapes(TOKENS)
    rewritten = in_slabs(trace(both, (weights, x), {}, {"donate_argnums": 0}))
    assert [record.transform.inside for record in rewritten.in_slabs] == [()]
