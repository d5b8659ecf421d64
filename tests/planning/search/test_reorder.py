"""Reordered kernels are legal, and take less if an order can."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.legal import fault
from memplan.planning.packing import live_nbytes
from memplan.planning.problem import Problem
from memplan.planning.schedule import runs
from memplan.planning.search.reorder import reorder
from tests.planning.steps import MIB, Builder, accumulating, training


def peak(problem: Problem, order: tuple[int, ...] | None = None) -> int:
    return int(live_nbytes(problem, None if order is None else runs(order)).max())


@given(st.integers(2, 10), st.integers(0, 99))
def test_legal(layers: int, seed: int) -> None:
    for problem in (training(layers, seed), accumulating(min(layers, 6), 3, seed)):
        order = reorder(problem)
        assert sorted(order) == list(range(len(problem.kernels)))
        assert fault(problem, runs(range(len(problem.kernels)))) is None
        assert fault(problem, runs(order)) is None


def test_what_frees_runs_early_and_what_fills_runs_late() -> None:
    b = Builder()
    (x,) = b.kernel((), MIB)
    (wide,) = b.kernel((x,), 8 * MIB)
    (mask,) = b.kernel((x,), 4 * MIB)  # wanted at the end alone
    (second_wide,) = b.kernel((x,), 8 * MIB)
    (narrow,) = b.kernel((wide,), 8)  # frees eight
    (small,) = b.kernel((second_wide, narrow), 8)
    b.kernel((mask, small), 8, output=True)
    problem = b.problem()
    assert peak(problem) == 21 * MIB
    best = min(
        peak(problem, order)
        for order in permutations(range(7))
        if fault(problem, runs(order)) is None
    )
    assert peak(problem, reorder(problem)) == best


def test_pairs_under_way_keep_what_they_overlap() -> None:
    b = Builder()
    (x,) = b.kernel((), MIB)
    (start,) = b.kernel((x,), MIB, recomputable=False)
    (beside,) = b.kernel((x,), 8 * MIB)
    b.end(start)
    b.kernel((start, beside), 8, output=True)
    assert reorder(b.problem()) == (0, 1, 2, 3, 4)
