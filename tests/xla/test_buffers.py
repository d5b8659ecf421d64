"""Bytes as XLA assigns them, of modules as they are and with kernels run again; and results to the bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from memplan.planning.problem import Problem
from memplan.planning.schedule import Schedule, runs
from tests.xla.compiling import STEPS, compiled, copying, randomly, within


def temporary_bytes(done: Any) -> int:
    return done.memory_analysis().temp_size_in_bytes


@pytest.mark.gpu_aot
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_a_gpu_gets_the_bytes_that_were_predicted(name: str, seed: int) -> None:
    step, args = STEPS[name](256, 6)
    found = compiled(step, args, name, randomly(seed), "v100")
    assert found.packing.nbytes == pytest.approx(temporary_bytes(found.compiled), abs=2048)
    assert found.packing.live_nbytes <= found.packing.nbytes
    assert bool(found.repeated) == bool(seed and name != "scanned")  # its body has nothing worth it


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", ["dense", "branching", "accumulating"])
def test_copies_take_the_host_bytes_that_were_predicted(name: str) -> None:
    step, args = STEPS[name](256, 6)
    found = compiled(step, args, name, copying(1), "v100")
    memory = found.compiled.memory_analysis()
    assert found.copies >= 4
    assert found.packing.host_nbytes == memory.host_temp_size_in_bytes > 0
    assert found.packing.nbytes == pytest.approx(memory.temp_size_in_bytes, abs=2048)
    assert found.packing.live_nbytes < found.plain.live_nbytes or name == "branching"  # whose peak is in a branch


@pytest.mark.parametrize("name", STEPS)
def test_kernels_that_run_again_change_no_bit_here(name: str) -> None:
    plain = None
    for seed in range(4):
        step, args = STEPS[name](64, 6)
        found = compiled(step, args, name, randomly(seed))
        assert found.packing.nbytes == pytest.approx(temporary_bytes(found.compiled), rel=0.02)
        bits = [np.asarray(leaf) for leaf in jax.tree.leaves(found.compiled(*args))]
        plain = plain or bits
        assert (found.repeated > 0) == (seed > 0)
        for one, other in zip(plain, bits, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_loop_says_how_often_its_body_runs() -> None:
    found: list[Problem] = []
    step, args = STEPS["scanned"](64, 6)

    def look(problem: Problem) -> Schedule:
        found.append(problem)
        return runs(range(len(problem.kernels)))

    compiled(step, args, "scanned", look)
    loops = [kernel.trips for kernel in found[0].kernels if kernel.trips > 1]
    assert loops == [6, 6]
    inner = {number for number, kernel in enumerate(found[0].kernels) if kernel.within is not None}
    assert {found[0].times[number] for number in inner} == {6}


@pytest.mark.gpu_aot
def test_a_plan_takes_what_it_was_given_in_one_compilation() -> None:
    step, args = STEPS["dense"](256, 12)
    found = compiled(step, args, "dense", within(0.6), "v100")
    assert found.packing.nbytes == pytest.approx(temporary_bytes(found.compiled), abs=2048)
    assert found.packing.live_nbytes <= 0.62 * found.plain.live_nbytes


@pytest.mark.parametrize("share", [0.75, 0.55])
def test_a_plan_changes_no_bit_here(share: float) -> None:
    step, args = STEPS["dense"](64, 12)
    plain = compiled(step, args, "dense", randomly(0)).compiled(*args)
    step, args = STEPS["dense"](64, 12)
    found = compiled(step, args, "dense", within(share))
    assert found.repeated
    assert found.packing.live_nbytes <= (share + 0.03) * found.plain.live_nbytes
    assert found.packing.nbytes == pytest.approx(temporary_bytes(found.compiled), rel=0.02)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(found.compiled(*args)), strict=True):
        np.testing.assert_array_equal(one, other)
