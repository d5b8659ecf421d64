"""Planners on stages, compared with exhaustive search and with each other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from experiments.planners.bound import lower_bound
from experiments.planners.evict import evict, prune
from experiments.planners.solve import solve
from experiments.planners.stages import Stages, extra_ticks, fits, replay, stages_of_nodes
from tests.experiments.planners.stage_graphs import least_extra_ticks, random_stages


def agree(seed: int) -> None:
    stages = random_stages(random.Random(seed))
    optimum = least_extra_ticks(stages)
    answer = solve(stages, seconds=120, runs=2, workers=1)
    if optimum is None:
        assert answer.status == "infeasible" and answer.recomputed is None
        return
    assert (answer.status, answer.extra_ticks, answer.bound_ticks) == ("optimal", optimum, optimum)
    assert answer.recomputed is not None and fits(stages.refine(2), answer.recomputed)
    assert (lower_bound(stages).extra_ticks or 0) <= optimum


@pytest.mark.parametrize("seed", range(30))
def test_a_proof_agrees_with_every_sequence(seed: int) -> None:
    agree(seed)


@pytest.mark.slow
def test_a_proof_agrees_with_every_sequence_on_three_hundred_graphs() -> None:
    for seed in range(300):
        agree(seed)


def chain_and_back(length: int, budget_bytes: int) -> Stages:
    """A forward chain, and a backward chain that reads it in reverse."""
    inputs: list[list[int]] = [[node - 1] if node else [] for node in range(length)]
    for node in range(length, 2 * length):
        inputs.append([node - 1, 2 * length - 1 - node])
    return stages_of_nodes([1] * (2 * length), [1] * (2 * length), inputs, budget_bytes)


@pytest.mark.parametrize("seed", range(10))
def test_more_budget_is_never_slower(seed: int) -> None:
    stages = random_stages(random.Random(1000 + seed), max_nodes=9)
    previous = None
    kept = replay(stages, ()).peak_nbytes
    for budget in (*range(max(stages.least_nbytes), kept, 2), kept):
        answer = solve(replace(stages, budget_bytes=budget), seconds=120, workers=1)
        if previous is not None:
            assert answer.status == "optimal" and answer.extra_ticks <= previous
        if answer.recomputed is not None:
            previous = answer.extra_ticks
    assert previous == 0


@pytest.mark.parametrize("budget", [6, 7, 9, 12])
def test_neighbourhoods_are_no_worse_than_eviction_and_no_better_than_a_proof(budget: int) -> None:
    stages = chain_and_back(12, budget)
    first = prune(stages, evict(stages))
    answer = solve(stages, seconds=2, prove=False)
    best = solve(stages, seconds=120)
    assert best.status == "optimal" and answer.recomputed is not None
    assert fits(stages, answer.recomputed) and best.extra_ticks <= answer.extra_ticks
    assert not fits(stages, first) or answer.extra_ticks <= extra_ticks(stages, first)


@pytest.mark.parametrize("prove", [True, False])
def test_a_budget_below_one_stage_names_it(prove: bool) -> None:
    stages = stages_of_nodes([1, 5, 7, 1], [1, 1, 1, 1], [[], [0], [1], [2]], 11)
    answer = solve(stages, 60.0, prove)
    assert (answer.status, answer.stage, answer.stage_nbytes) == ("infeasible", 2, 12)


def test_what_may_not_run_again_is_kept() -> None:
    stages = replace(chain_and_back(6, 5), ticks=(None,) * 12)
    assert solve(stages, 60.0).status == "infeasible"
    assert lower_bound(stages).extra_ticks is None


def test_replay_counts_only_the_last_copy_that_is_still_needed() -> None:
    stages = stages_of_nodes([2, 3, 4, 1], [1, 1, 1, 1], [[], [0], [1], [0, 2]], 100)
    kept = replay(stages, ())
    assert kept.step_nbytes == (2, 5, 9, 7)
    again = replay(stages, [(0, 3)])
    assert again.steps == ((0, -1), (1, -1), (2, -1), (3, 0), (3, -1))
    assert again.step_nbytes == (2, 5, 7, 6, 7)
    assert again.spans[0] == ((0, 1), (3, 3))
