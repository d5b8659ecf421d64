"""Plans: legal, within the budget where they say so, as fast as they say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.planning.floor import floor
from memplan.planning.legal import fault
from memplan.planning.packing import pack
from memplan.planning.problem import Problem
from memplan.planning.schedule import Kind, runs, seconds
from memplan.planning.search.effort import Effort
from memplan.planning.search.planner import plan
from memplan.planning.search.reorder import reorder
from tests.planning.steps import accumulating, fetching, training


def check(problem: Problem, share: float, host_nbytes: int) -> None:
    budget = int(share * pack(problem).nbytes)

    def copy_s(nbytes: int) -> float:
        return nbytes / 2**23

    found = plan(problem, budget, host_nbytes, copy_s, effort=Effort(evaluations=500))
    packed = pack(problem, found.schedule)
    assert fault(problem, found.schedule) is None
    assert (found.nbytes, found.host_nbytes) == (packed.nbytes, packed.host_nbytes)
    assert found.host_nbytes <= host_nbytes
    assert found.seconds == seconds(problem, found.schedule, copy_s)
    assert found.fits == (found.nbytes <= budget)
    assert found.bound_s <= found.seconds * (1 + 1e-12)  # sums in another order round differently
    if budget < floor(problem)[0]:
        assert not found.fits


@settings(max_examples=15)
@given(st.integers(3, 10), st.integers(0, 99), st.sampled_from([0.9, 0.75, 0.6]), st.sampled_from([0, 2**40]))
def test_plans_are_what_they_say(layers: int, seed: int, share: float, host_nbytes: int) -> None:
    check(training(layers, seed), share, host_nbytes)


@settings(max_examples=10)
@given(st.integers(3, 6), st.integers(0, 99), st.sampled_from([0.9, 0.75]), st.sampled_from([0, 2**40]))
def test_bodies_of_loops_are_planned_too(layers: int, seed: int, share: float, host_nbytes: int) -> None:
    check(accumulating(layers, 3, seed), share, host_nbytes)


@settings(max_examples=15)
@given(st.integers(3, 8), st.integers(0, 99), st.sampled_from([0.9, 0.75, 0.6]))
def test_what_comes_by_a_pair_leaves_behind_its_end(layers: int, seed: int, share: float) -> None:
    check(fetching(layers, seed), share, 2**40)


def test_an_inner_kernel_runs_again_inside_of_its_body() -> None:
    problem = accumulating(8, 3, 0)
    found = plan(problem, int(0.8 * pack(problem).nbytes))
    assert found.fits
    ran = [action.number for action in found.schedule]
    again = [number for at, number in enumerate(ran) if number in ran[:at]]
    assert again and all(problem.kernels[number].block is not None for number in again)
    assert found.seconds == pytest.approx(found.bound_s + sum(3 * problem.kernels[number].seconds for number in again))


@given(st.integers(3, 10), st.integers(0, 99))
def test_nothing_is_repeated_where_an_order_fits(layers: int, seed: int) -> None:
    problem = training(layers, seed)
    for budget in (pack(problem).nbytes, pack(problem, runs(reorder(problem))).nbytes):
        found = plan(problem, budget)
        assert found.fits
        assert sorted(action.number for action in found.schedule) == list(range(len(problem.kernels)))


def test_the_same_plan_every_time() -> None:
    problem = training(10, 3)
    budget = int(0.7 * pack(problem).nbytes)
    effort = Effort(evaluations=500)
    found = [plan(problem, budget, 2**40, lambda nbytes: nbytes / 2**24, effort) for _ in range(2)]
    assert found[0] == found[1]


def test_copies_that_cost_nothing_leave_no_repetition() -> None:
    problem = training(10, 5)
    found = plan(problem, int(0.75 * pack(problem).nbytes), 2**40, lambda nbytes: nbytes * 1e-12)
    assert found.fits
    assert any(action.kind is Kind.OFFLOAD for action in found.schedule)
    assert found.seconds < found.bound_s * 1.001
