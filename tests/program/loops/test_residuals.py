"""Loops with other residuals compute the same."""

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memplan.errors import PlanMismatchError
from memplan.hardware import catalog
from memplan.hardware.efficiency import PEAK
from memplan.planning.loops import PRICES, Loop, Residuals, can_segment, cheapest
from memplan.planning.transforms import LoopResiduals
from memplan.program import compat
from memplan.program.loops.residuals import follow_residuals, outer_loops, with_residuals
from memplan.program.lowerable import Lowerable
from memplan.program.trace import trace
from memplan.program.transforms import apply_all
from memplan.xla.target import Target
from tests.program.scans import (
    STEPS,
    assert_same,
    layers,
    outputs,
    plain,
    random_step,
    traced,
)
from tests.xla.thunks import dump_options, dumped_thunks, loops

# Its kernels take no time of their own: bytes and FLOPs of toys decide as those of large steps do.
DEVICE = dataclasses.replace(catalog.named("v100"), efficiency=PEAK)


def least(loop: Loop) -> Residuals:
    return cheapest(loop, PRICES[-1], DEVICE)


def moved(loop: Loop) -> Residuals:
    return cheapest(loop, PRICES[-1], DEVICE, offload=True)


def every_value(loop: Loop) -> Residuals:
    return Residuals(
        tuple(value for value in range(len(loop.body.values)) if value not in loop.available)
    )


def in_segments(
    loop: Loop, segments: int = 2, trips: int = 2, moves: bool = False
) -> Residuals | None:
    """The first four trips, of all that may be."""
    flags = tuple(moves and loop.body.nbytes(value) > 8 for value in loop.carried)
    fields = {"segments": segments, "segment_trips": trips, "snapshots_on_host": flags}
    segmented = dataclasses.replace(least(loop), **fields)
    return segmented if can_segment(loop, segmented) else least(loop)


def in_segments_on_host(loop: Loop) -> Residuals | None:
    return in_segments(loop, moves=True)


def all_in_segments(loop: Loop) -> Residuals | None:
    return in_segments(loop, segments=loop.trips, trips=1)


def in_one_segment(loop: Loop) -> Residuals | None:
    return in_segments(loop, segments=1, trips=loop.trips)


def copied_in_loops(folder: Path) -> int:
    """How many copies of dumped loops are asynchronous, none of them a kernel."""
    inside = [thunk for loop in loops(dumped_thunks(folder)) for thunk in loop.inside]
    moved = [thunk for thunk in inside if thunk.kind == "kAsyncStart"]
    assert all(thunk.has("kCopy") and not thunk.has("kCustomKernel") for thunk in moved)
    return len(moved)


IN_SOME_STEPS = (every_value, in_segments, all_in_segments, in_one_segment)
IN_EVERY_WAY = ("layers", "time_steps", "nested")


@pytest.mark.parametrize(
    ("name", "decide"),
    [
        pytest.param(
            name,
            decide,
            id=f"{name}-{decide.__name__}",
            marks=[pytest.mark.slow] * (decide in IN_SOME_STEPS and name not in IN_EVERY_WAY),
        )
        for name in STEPS
        for decide in (least, moved, in_segments_on_host, *IN_SOME_STEPS)
    ],
)
def test_the_numbers_stay_the_same(name: str, decide: Any) -> None:
    program, args = traced(name)
    assert_same(outputs(with_residuals(program, decide), args), plain(name), 1e-5)


@pytest.mark.parametrize("decide", [least, in_segments_on_host])
@pytest.mark.parametrize("name", STEPS)
def test_a_plan_writes_the_same_program_again(name: str, decide: Any) -> None:
    program, _ = traced(name)
    once = with_residuals(program, decide)
    again = apply_all(program, once.transforms)
    assert again.transforms == once.transforms
    assert str(again.jaxpr) == str(once.jaxpr)


def test_which_steps_have_pairs_of_loops() -> None:
    assert {name: len(with_residuals(traced(name)[0], least).loops) for name in STEPS} == {
        "layers": 1, "time_steps": 1, "backwards": 1, "nested": 2, "accumulated": 1, "checkpointed": 1, "mapped": 1,
        "stacked_twice": 2, "dropped_out": 1, "branching": 2, "of_flax": 1,
    }  # fmt: skip


def test_a_loop_of_layers_keeps_nothing_but_what_it_carries() -> None:
    step, args = layers()
    program = trace(step, args, {}, {})
    (loop,) = outer_loops(program)
    assert (loop.trips, loop.runs) == (5, 1)
    residuals = least(loop)
    assert [loop.body.values[value].shape for value in residuals.kept] == [(3, 4)]
    assert all(loop.body.producer[value] is None for value in residuals.kept)
    stacks = [
        var.aval.shape
        for eqn in with_residuals(program, least).jaxpr.jaxpr.eqns
        for var in eqn.outvars
    ]
    assert stacks.count((5, 3, 4)) == 1


@pytest.mark.gpu_aot
@pytest.mark.parametrize("reverse", [False, True])
def test_stacks_on_the_host_are_copied_at_the_right_places(reverse: bool, tmp_path: Path) -> None:
    """Some jaxlibs copied slice `n - 1 - i` from the other end of the stack (openxla/xla#46231)."""

    def loss(ws: Any, x: Any) -> Any:
        return (
            jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws, reverse=reverse)[0] ** 2
        ).sum()

    trips, args = (
        8,
        (
            jax.ShapeDtypeStruct((8, 512, 512), np.float32),
            jax.ShapeDtypeStruct((4096, 512), np.float32),
        ),
    )
    program = with_residuals(trace(jax.grad(loss), args, {}, {}), moved)
    target = Target(catalog.named("a100"), described=True)
    lowerable = Lowerable(compat.jaxpr_as_fun(program.jaxpr), args)
    executable = target.compile(lowerable, dump_options(tmp_path))
    assert copied_in_loops(tmp_path) >= 2
    layer = 4 * 4096 * 512
    offsets = re.findall(r'"byte_offset":"(\d+)","byte_stride":"(-?\d+)"', executable.text)
    copies = [(int(offset), int(stride)) for offset, stride in offsets if abs(int(stride)) == layer]
    # A trip writes the layer before its own, at first padding, and fetches the layer after its own.
    out, back = (
        ((trips * layer, -layer), (layer, layer))
        if reverse
        else ((0, layer), ((trips - 1) * layer, -layer))
    )
    assert copies == [out, back]


def test_a_step_without_pairs_is_left_alone() -> None:
    program = trace(
        lambda xs: jax.lax.scan(lambda c, x: (c + x, c), 0.0, xs), (np.ones(3, np.float32),), {}, {}
    )
    assert outer_loops(program) == []
    assert with_residuals(program, least) is program


def test_loops_can_be_left_as_they_are() -> None:
    program = trace(*layers(), {}, {})
    assert with_residuals(program, lambda loop: None) is program


@pytest.mark.parametrize(
    "loops",
    [
        (),
        (Residuals((0,)), Residuals((0,))),
        (Residuals(()),),
        (Residuals((99,)),),
        (Residuals((-1,)),),
    ],
)
def test_loops_of_another_step_are_refused(loops: Any) -> None:
    program = trace(*layers(), {}, {})
    if not loops:
        assert follow_residuals(program, LoopResiduals(loops)) is program
        return
    with pytest.raises(PlanMismatchError, match="Plan again"):
        follow_residuals(program, LoopResiduals(loops))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_loops_with_random_residuals(seed: int) -> None:
    """In float64, where a wrong order of trips cannot pass for rounding."""
    draw = random.Random(seed)

    def decide(loop: Loop) -> Residuals | None:
        if draw.random() < 0.1:
            return None
        residuals = cheapest(loop, draw.choice(PRICES), DEVICE, draw.random() < 0.5)
        values = [value for value in range(len(loop.body.values)) if value not in loop.available]
        extra = {value for value in values if draw.random() < 0.2} - set(residuals.stacked)
        residuals = dataclasses.replace(residuals, kept=tuple(sorted((*residuals.kept, *extra))))
        length = draw.randint(1, loop.trips) if loop.trips else 0
        flags = tuple(draw.random() < 0.3 for _ in loop.carried)
        stacked = tuple(sorted(residuals.stacked))
        segments = draw.randint(1, max(1, loop.trips // max(1, length)))
        segmented = Residuals(stacked, (), segments, length, flags)
        return segmented if draw.random() < 0.5 and can_segment(loop, segmented) else residuals

    with jax.enable_x64(True):
        step, args = random_step(seed)
        program = trace(step, args, {}, {})
        assert_same(outputs(with_residuals(program, decide), args), outputs(program, args), 1e-9)
