"""Plans: legal, within the budget if they say so, as fast as they say."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import UnsupportedProgramError
from memplan.planning.floor import floor
from memplan.planning.legal import fault, must_run_once
from memplan.planning.packing import pack
from memplan.planning.problem import Pin, Problem, Where
from memplan.planning.schedule import Kind, runs, seconds
from memplan.planning.search.effort import Effort
from memplan.planning.search.planner import plan
from memplan.planning.search.reorder import reorder
from tests.planning.steps import accumulating, fetching, training


def check(problem: Problem, share: float, host_nbytes: int) -> None:
    budget = int(share * pack(problem).nbytes)

    def copy_s(nbytes: int) -> float:
        return nbytes / 2**23

    solution = plan(problem, budget, host_nbytes, copy_s, effort=Effort(evaluations=500))
    packing = pack(problem, solution.schedule)
    assert fault(problem, solution.schedule) is None
    assert (solution.nbytes, solution.host_nbytes) == (packing.nbytes, packing.host_nbytes)
    assert solution.host_nbytes <= host_nbytes
    assert solution.seconds == seconds(problem, solution.schedule, copy_s)
    assert solution.fits == (solution.nbytes <= budget)
    # sums in another order round differently
    assert solution.bound_s <= solution.seconds * (1 + 1e-12)
    if budget < floor(problem)[0]:
        assert not solution.fits


SEEDS = st.integers(0, 99)
TRAININGS = st.builds(training, st.integers(3, 10), SEEDS)
LOOPS = st.builds(accumulating, st.integers(3, 6), st.just(3), SEEDS)
PAIRS = st.builds(fetching, st.integers(3, 8), SEEDS)


@settings(max_examples=20)
@given(TRAININGS | LOOPS | PAIRS, st.sampled_from([0.9, 0.75, 0.6]), st.sampled_from([0, 2**40]))
def test_plans_are_what_they_say(problem: Problem, share: float, host_nbytes: int) -> None:
    check(problem, share, host_nbytes)


def test_an_inner_kernel_runs_again_inside_of_its_body() -> None:
    problem = accumulating(8, 3, 0)
    solution = plan(problem, int(0.8 * pack(problem).nbytes))
    assert solution.fits
    numbers = [action.number for action in solution.schedule]
    repeated = [number for index, number in enumerate(numbers) if number in numbers[:index]]
    assert repeated and all(problem.kernels[number].block is not None for number in repeated)
    assert solution.seconds == pytest.approx(
        solution.bound_s + sum(3 * problem.kernels[number].seconds for number in repeated)
    )


@settings(max_examples=30)
@given(st.integers(3, 10), st.integers(0, 99))
def test_nothing_is_repeated_where_an_order_fits(layers: int, seed: int) -> None:
    problem = training(layers, seed)
    for budget in (pack(problem).nbytes, pack(problem, runs(reorder(problem))).nbytes):
        solution = plan(problem, budget)
        assert solution.fits
        numbers = sorted(action.number for action in solution.schedule)
        assert numbers == list(range(len(problem.kernels)))


def test_the_same_plan_every_time() -> None:
    problem = training(10, 3)
    budget = int(0.7 * pack(problem).nbytes)
    effort = Effort(evaluations=500)

    def copy_s(nbytes: int) -> float:
        return nbytes / 2**24

    first, second = (plan(problem, budget, 2**40, copy_s, effort) for _ in range(2))
    assert first == second


def test_copies_that_cost_nothing_leave_no_repetition() -> None:
    problem = training(10, 5)
    solution = plan(problem, int(0.75 * pack(problem).nbytes), 2**40, lambda nbytes: nbytes * 1e-12)
    assert solution.fits
    assert any(action.kind is Kind.OFFLOAD for action in solution.schedule)
    assert solution.seconds < solution.bound_s * 1.001


@settings(max_examples=40)
@given(
    st.data(),
    st.integers(3, 9),
    st.integers(0, 99),
    st.sampled_from([2.0, 0.9, 0.75]),
    st.booleans(),
)
def test_pins_are_kept(
    data: st.DataObject, layers: int, seed: int, share: float, loops: bool
) -> None:
    """On the device: neither copied nor made again; on the host: copied, made once; recomputed: made again."""
    problem = accumulating(layers, 3, seed) if loops else training(layers, seed, sharing=False)
    residuals = sorted(_residuals(problem))
    pinned = data.draw(st.lists(st.sampled_from(residuals), max_size=4, unique=True))
    where = {number: data.draw(st.sampled_from(Where)) for number in pinned}
    buffers = (
        replace(buffer, pin=Pin(buffer.name, where[number])) if number in where else buffer
        for number, buffer in enumerate(problem.buffers)
    )
    problem = replace(problem, buffers=tuple(buffers))
    budget = int(share * pack(problem).nbytes)
    solution = plan(problem, budget, 2**40, lambda nbytes: nbytes / 2**23, Effort(evaluations=300))
    assert fault(problem, solution.schedule) is None
    assert solution.nbytes == pack(problem, solution.schedule).nbytes
    schedule = solution.schedule
    run_counts = Counter(action.number for action in schedule if action.kind is Kind.RUN)
    copy_counts = Counter(action.number for action in schedule if action.kind is Kind.OFFLOAD)
    for number, pinned_to in where.items():
        maker = problem.buffers[number].maker
        assert maker is not None
        assert bool(copy_counts[number]) == (pinned_to is Where.HOST)
        is_right = (run_counts[maker] > 1) == (pinned_to is Where.RECOMPUTE)
        assert is_right or _made_together(problem, maker, where)


def _residuals(problem: Problem) -> set[int]:
    """Temporaries with a place of their own that are read twice, with kernels of their computation between."""
    residuals = set()
    for number, buffer in enumerate(problem.buffers):
        readers = [index for index, kernel in enumerate(problem.kernels) if number in kernel.reads]
        if buffer.maker is None or must_run_once(problem, buffer.maker) or len(readers) < 2:
            continue
        block = problem.kernels[buffer.maker].block
        same_block = all(problem.kernels[reader].block == block for reader in readers)
        if same_block and readers[-1] - readers[-2] > 3:
            residuals.add(number)
    return residuals


def _made_together(problem: Problem, maker: int, where: Mapping[int, Where]) -> bool:
    """Does a kernel make values that are pinned to different places? Those on the device win."""
    return len({where[number] for number in problem.kernels[maker].writes if number in where}) > 1


def test_a_pin_that_nothing_keeps_is_told() -> None:
    problem = training(4, 0, sharing=False)
    number = min(_residuals(problem))
    buffers = [*problem.buffers]
    buffers[number] = replace(buffers[number], pin=Pin("hidden", Where.HOST))
    problem = replace(problem, buffers=tuple(buffers))
    with pytest.raises(UnsupportedProgramError, match=r"'hidden' to 'host'.*host budget"):
        plan(problem, pack(problem).nbytes)
