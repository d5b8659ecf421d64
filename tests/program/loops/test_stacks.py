"""Loops that read their stacks by index compute the same, and XLA writes no second stack for them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.planning.plan import Plan
from memplan.planning.transforms import IndexedStacks
from memplan.program import compat
from memplan.program.loops.stacks import with_indexed_stacks
from memplan.program.trace import Program, trace
from tests.arrays import assert_equal

TRIPS, ROWS, WIDTH = 4, 256, 512  # a stack of 2 MiB

Step = Callable[[Any, Any], Any]


def update(state: Any, batch: Any) -> Any:
    new = jnp.tanh(batch @ state)
    return state + 1e-3 * (batch.T @ new), new.sum()


def in_a_scan(state: Any, batches: Any) -> Any:
    return jax.lax.scan(update, state, batches)


def backwards_and_unrolled(state: Any, batches: Any) -> Any:
    return jax.lax.scan(update, state, batches, reverse=True, unroll=2)


def with_small_stacks_beside(state: Any, batches: Any) -> Any:
    def trip(state: Any, slices: Any) -> Any:
        rate, batch, key = slices
        new, loss = update(state * rate, batch)
        return new, loss + jax.random.uniform(key)

    keys = jax.random.split(jax.random.key(0), TRIPS)
    return jax.lax.scan(trip, state, (jnp.linspace(0.9, 1.0, TRIPS), batches, keys))


def scan_in_scan(state: Any, batches: Any) -> Any:
    return jax.lax.scan(in_a_scan, state, batches.reshape(2, TRIPS // 2, ROWS, WIDTH))


def scan_in_a_branch_in_a_scan(state: Any, batches: Any) -> Any:
    def trip(state: Any, half: Any) -> Any:
        def not_taken(state: Any, half: Any) -> Any:
            return state, half[:, 0, 0]

        return jax.lax.cond(half[0, 0, 0] > 0, in_a_scan, not_taken, state, half)

    return jax.lax.scan(trip, state, batches.reshape(2, TRIPS // 2, ROWS, WIDTH))


def branch_in_scan_in_scan(state: Any, batches: Any) -> Any:
    def trip(state: Any, slices: Any) -> Any:
        return jax.lax.cond(slices[0], update, lambda state, batch: (state, 0.0), state, slices[1])

    flags = jnp.array([[True, False], [True, True]])
    halves = batches.reshape(2, TRIPS // 2, ROWS, WIDTH)
    return jax.lax.scan(lambda *args: jax.lax.scan(trip, *args), state, (flags, halves))


def by_hand(state: Any, batches: Any) -> Any:
    return jax.lax.fori_loop(
        0, TRIPS, lambda number, state: update(state, batches[number])[0], state
    )


def in_a_while_loop(state: Any, batches: Any) -> Any:
    def trip(carry: Any) -> Any:
        number, state = carry
        return number + 1, update(
            state, jax.lax.dynamic_index_in_dim(batches, number, keepdims=False)
        )[0]

    return jax.lax.while_loop(lambda carry: carry[0] < TRIPS, trip, (0, state))


def made_in_the_step(state: Any, batches: Any) -> Any:
    return jax.lax.scan(update, state, jnp.sin(batches))


LOOPS: tuple[Step, ...] = (
    in_a_scan, backwards_and_unrolled, with_small_stacks_beside, scan_in_scan, scan_in_a_branch_in_a_scan,
    branch_in_scan_in_scan, by_hand, in_a_while_loop, made_in_the_step,
)  # fmt: skip


def differentiated(state: Any, batches: Any) -> Any:
    """A pair of loops: one stacks what the other reads."""
    return jax.grad(lambda state: in_a_scan(state, batches)[1].sum())(state)


def small(state: Any, batches: Any) -> Any:
    return jax.lax.scan(lambda carry, row: (carry + row, None), state[0], batches[:, 0])


def in_a_branch_alone(state: Any, batches: Any) -> Any:
    return jax.lax.cond(state[0, 0] > 0, lambda: batches[1] @ state, lambda: batches[2] @ state)


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return tuple(
        jnp.array(draw.normal(size=shape), jnp.float32)
        for shape in ((WIDTH, WIDTH), (TRIPS, ROWS, WIDTH))
    )


def of(step: Step) -> Program:
    return trace(step, arguments(), {}, {})


def equations(closed: Any) -> list[Any]:
    return [
        inner
        for eqn in closed.jaxpr.eqns
        for inner in (eqn, *(e for body in compat.sub_jaxprs(eqn) for e in equations(body)))
    ]


def large_slices(closed: Any) -> int:
    """Stacks above 1 MiB that scans get slices of."""
    scans = [(eqn, scan) for eqn in equations(closed) if (scan := compat.scan_of(eqn))]
    return sum(
        compat.nbytes_of(stack.aval) > 1 << 20
        for eqn, scan in scans
        for stack in scan.split(eqn.invars)[2]
    )


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
def test_the_same_bits_and_every_slice_of_a_large_stack_in_order(step: Step) -> None:
    program = of(step)
    rewritten = with_indexed_stacks(program)
    assert rewritten.transforms == (IndexedStacks(),) and not program.transforms
    assert large_slices(rewritten.jaxpr) == 0
    assert any(eqn.primitive.name == "layout_constraint" for eqn in equations(rewritten.jaxpr))
    steps = (compat.jaxpr_as_fun(version.jaxpr) for version in (program, rewritten))
    assert_equal(*(jax.jit(step)(*arguments()) for step in steps))


def test_an_inner_slice_is_cut_from_the_outer_stack() -> None:
    """The branch that reads it slices the stack by two indices; the outer scan slices nothing."""
    rewritten = with_indexed_stacks(of(branch_in_scan_in_scan))
    (slice_,) = (eqn for eqn in equations(rewritten.jaxpr) if eqn.primitive.name == "dynamic_slice")
    assert slice_.invars[0].aval.shape == (2, TRIPS // 2, ROWS, WIDTH)
    assert slice_.outvars[0].aval.shape == (1, 1, ROWS, WIDTH)


@pytest.mark.parametrize(
    "step", [differentiated, small, in_a_branch_alone, update], ids=lambda step: step.__name__
)
def test_pairs_of_loops_small_stacks_and_what_is_in_no_loop_stay(step: Step) -> None:
    state, batches = arguments()
    args = (state, batches[0]) if step is update else (state, batches)
    assert with_indexed_stacks(trace(step, args, {}, {})) is None


LAST = ("NHWC", "HWIO", "NHWC")  # XLA transposes to NCHW for float32


def images(state: Any, batches: Any) -> Any:
    def trip(state: Any, batch: Any) -> Any:
        image = batch
        for filters in state:
            image = jax.lax.conv_general_dilated(image, filters, (1, 1), "SAME", None, None, LAST)
            image = jax.nn.relu(image)
        return [filters + image.mean() for filters in state], image.sum()

    return jax.lax.scan(trip, state, batches)


IMAGES = (
    [jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)] * 3,
    jax.ShapeDtypeStruct((8, 16, 64, 64, 8), jnp.float32),  # 16 MiB
)


@pytest.mark.gpu_aot
def test_xla_writes_no_second_stack(tmp_path: Path) -> None:
    """As they are, loops keep the whole transposed stack in every trip: no plan of their kernels fits without it."""
    plain = memplan.jit(images, device="a100").plan(*IMAGES).report.compiled_peak_bytes
    budget = plain - math.prod(IMAGES[1].shape) * 4
    planned = memplan.jit(images, device="a100", budget=budget).plan(*IMAGES)
    assert planned.plan.transforms == (IndexedStacks(),)
    assert planned.report.compiled_peak_bytes <= budget
    planned.plan.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")
    again = memplan.jit(images, device="a100", budget=budget, plan=saved).plan(*IMAGES)
    assert again.plan == planned.plan
    assert again.report.compiled_peak_bytes == planned.report.compiled_peak_bytes
