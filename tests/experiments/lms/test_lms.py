"""LMS as a planner: everything that the backward pass reads moves, and nothing is computed again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import memplan
from experiments.lms.__main__ import CASES, README, table
from experiments.lms.planner import THRESHOLD_NBYTES, LargeModelSupport
from experiments.readme import inserted
from memplan.planning.legal import fault
from memplan.planning.problem import Problem
from memplan.planning.schedule import Kind
from tests.dense import step
from tests.planning.small import actions, problem


def chain(nbytes: int) -> Problem:
    """Kernels 0 to 3 are the forward pass, 4 is the loss; each later one reads a forward result and a gradient."""
    reads = [[], [0], [1], [2], [3], [4, 3], [5, 2], [6, 1], [7, 0]]
    return problem(reads, [nbytes] * 4 + [8] * 5, outputs=[8])


def test_values_leave_after_their_last_forward_use_and_return_before_their_first_backward_use() -> (
    None
):
    """Value 3 stays: the loss and the first backward kernel read it at once."""
    small = chain(THRESHOLD_NBYTES)
    solution = LargeModelSupport(overlaps=False).plan(
        small, 4 * THRESHOLD_NBYTES, 2**30, lambda _: 1.0
    )
    assert solution.fits and fault(small, solution.schedule) is None
    forward = "run 0, run 1, offload 0, offloaded 0, run 2, offload 1, offloaded 1, run 3, offload 2, offloaded 2"
    backward = "prefetch 2, prefetched 2, run 6, prefetch 1, prefetched 1, run 7, prefetch 0, prefetched 0, run 8"
    assert solution.schedule == actions(forward, "run 4, run 5", backward)


def test_copies_overlap_with_kernels_within_the_budget() -> None:
    small = chain(THRESHOLD_NBYTES)
    kernels = tuple(replace(kernel, seconds=1.0) for kernel in small.kernels)
    timed = replace(small, kernels=kernels)
    waiting, overlapping = (
        LargeModelSupport(overlaps).plan(timed, 4 * THRESHOLD_NBYTES, 2**30, lambda _: 1.0)
        for overlaps in (False, True)
    )
    assert waiting.seconds == len(kernels) + 2 * 3
    assert overlapping.seconds < waiting.seconds and overlapping.fits
    assert overlapping.host_nbytes == waiting.host_nbytes == 3 * THRESHOLD_NBYTES


def test_small_values_stay() -> None:
    small = chain(THRESHOLD_NBYTES - 1)
    solution = LargeModelSupport().plan(small, 4 * THRESHOLD_NBYTES, 2**30, lambda _: 1.0)
    assert solution.host_nbytes == 0 and len(solution.schedule) == len(small.kernels)


@pytest.mark.gpu_aot
def test_every_activation_moves_and_no_kernel_runs_again() -> None:
    """The compiled step has the bits of the plain one: memplan's judge compares both modules before it compiles."""
    layers = 8
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
    plain = memplan.jit(step, device="v100").plan(weights, x).report
    activation_bytes = x.size * 4
    budget = plain.baseline_peak_bytes - 4 * activation_bytes
    lms = memplan.jit(step, budget=budget, device="v100", planner=LargeModelSupport(), split=False)
    result = lms.plan(weights, x)
    kinds = Counter(kind for kind, _ in result.plan.actions)
    runs = Counter(name for kind, name in result.plan.actions if kind is Kind.RUN)
    assert set(runs.values()) == {1} and not result.report.recomputations_found
    # The last layer's is read by the loss and by the first backward kernel, one right after the other.
    assert kinds[Kind.OFFLOAD] == kinds[Kind.PREFETCHED] >= layers - 1
    assert result.report.offloaded_bytes >= (layers - 1) * activation_bytes
    assert result.report.compiled_peak_bytes <= budget


def test_the_readme_is_what_the_results_say() -> None:
    text = README.read_text()
    assert text == inserted(text, table())
    assert {path.stem for path in (README.parent / "results").glob("*.json")} == set(CASES)
