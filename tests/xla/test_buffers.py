"""Bytes as XLA assigns them, of modules as they are and with kernels run again; and results to the bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tests.xla.compiling import STEPS, compiled


def temporary_bytes(done: Any) -> int:
    return done.memory_analysis().temp_size_in_bytes


@pytest.mark.gpu_aot
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_a_gpu_gets_the_bytes_that_were_predicted(name: str, seed: int) -> None:
    step, args = STEPS[name](256, 6)
    found = compiled(step, args, name, seed, "v100")
    assert found.packing.nbytes == pytest.approx(temporary_bytes(found.compiled), rel=0.003)
    assert found.packing.live_nbytes <= found.packing.nbytes
    assert bool(found.repeated) == bool(seed and name == "dense")  # a GPU has the whole of the scans in two kernels


@pytest.mark.parametrize("name", STEPS)
def test_kernels_that_run_again_change_no_bit_here(name: str) -> None:
    plain = None
    for seed in range(4):
        step, args = STEPS[name](64, 6)
        found = compiled(step, args, name, seed)
        assert found.packing.nbytes == pytest.approx(temporary_bytes(found.compiled), rel=0.02)
        bits = [np.asarray(leaf) for leaf in jax.tree.leaves(found.compiled(*args))]
        plain = plain or bits
        assert (found.repeated > 0) == (seed > 0)
        for one, other in zip(plain, bits, strict=True):
            np.testing.assert_array_equal(one, other)
