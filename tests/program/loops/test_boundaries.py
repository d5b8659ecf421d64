"""Residuals that cross boundaries: other residuals compute the same, and take fewer bytes."""

import dataclasses
import random
from typing import Any

import jax
import numpy as np
import pytest

from memplan.hardware import catalog
from memplan.hardware.efficiency import PEAK
from memplan.planning.loops import PRICES, Loop, Residuals, can_segment, cheapest, stacked_nbytes
from memplan.program.loops.residuals import outer_loops, with_residuals
from memplan.program.trace import trace
from memplan.program.transforms import apply_all
from tests.program.boundaries import STEPS, random_step
from tests.program.scans import assert_same, outputs, plain_outputs, traced_step

DEVICE = dataclasses.replace(catalog.named("v100"), efficiency=PEAK)


def least(loop: Loop) -> Residuals:
    return cheapest(loop, PRICES[-1], DEVICE)


def in_segments(loop: Loop) -> Residuals:
    flags = (False,) * len(loop.carried)
    fields = {"segments": 2, "segment_trips": 1, "snapshots_on_host": flags}
    segmented = dataclasses.replace(least(loop), **fields)
    return segmented if can_segment(loop, segmented) else least(loop)


@pytest.mark.parametrize(
    ("name", "decide"),
    [
        pytest.param(
            name,
            decide,
            id=f"{name}-{decide.__name__}",
            marks=[pytest.mark.slow] * (decide is in_segments and "shard_map" not in name),
        )
        for name in STEPS
        for decide in (least, in_segments)
    ],
)
def test_other_residuals_compute_the_same(name: str, decide: Any) -> None:
    program, args = traced_step(STEPS[name])
    assert_same(outputs(with_residuals(program, decide), args), plain_outputs(STEPS[name]), 1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_fewer_residuals_are_there_to_choose(name: str) -> None:
    loops = outer_loops(traced_step(STEPS[name])[0])
    assert loops
    assert sum(stacked_nbytes(loop, least(loop)) for loop in loops) < sum(
        stacked_nbytes(loop, None) for loop in loops
    )


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_writes_the_same_program_again(name: str) -> None:
    program, _ = traced_step(STEPS[name])
    once = with_residuals(program, least)
    again = apply_all(program, once.transforms)
    assert again.transforms == once.transforms
    assert str(again.jaxpr) == str(once.jaxpr)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 4)) for seed in range(80)]
)
def test_random_boundaries_with_random_residuals(seed: int) -> None:
    """In float64, where a wrong value cannot pass for rounding."""
    draw = random.Random(seed)

    def decide(loop: Loop) -> Residuals | None:
        if draw.random() < 0.2:
            return None
        residuals = cheapest(loop, draw.choice(PRICES), DEVICE)
        length = draw.randint(1, loop.trips)
        flags = (False,) * len(loop.carried)
        segments = draw.randint(1, max(1, loop.trips // length))
        segmented = Residuals(residuals.stacked, (), segments, length, flags)
        return segmented if draw.random() < 0.5 and can_segment(loop, segmented) else residuals

    with jax.enable_x64(True):
        step, args = random_step(seed)
        args = tuple(arg.astype(np.float64) for arg in args)
        program = trace(step, args, {}, {})
        assert_same(outputs(with_residuals(program, decide), args), outputs(program, args), 1e-9)
