"""Orders that keep the precedence are the legal ones."""

from dataclasses import replace
from itertools import permutations

from memplan.planning.legal import fault
from memplan.planning.precedence import precedence
from memplan.planning.problem import Kernel
from memplan.planning.schedule import runs
from tests.planning.small import fetching, looping, updating
from tests.planning.steps import MIB, Builder


def test_orders_that_keep_it_are_the_legal_ones() -> None:
    step = updating()
    before = precedence(step)
    for order in permutations(range(len(step.kernels))):
        kept = all(
            order.index(first) < order.index(unit)
            for unit, earlier in before.items()
            for first in earlier
        )
        assert kept == (fault(step, runs(order)) is None)


def test_nothing_crosses_an_asynchronous_pair() -> None:
    assert precedence(fetching()) == {0: set(), 1: {0}, 2: {0, 1}, 3: {0, 1, 2}}


def test_pairs_that_are_moved_are_crossed_and_their_readers_wait_for_their_end() -> None:
    assert precedence(fetching(), free={0, 2}) == {0: set(), 1: set(), 2: {0}, 3: {0, 1, 2}}


def test_what_a_moved_pair_reads_is_overwritten_behind_its_end() -> None:
    b = Builder()
    weight = b.argument(donated=True)
    (start,) = b.kernel((weight,), MIB, recomputable=False)
    b.kernel((weight,), MIB, aliases=weight, output=True)
    problem = replace(
        b.problem(), kernels=(*b.kernels, Kernel("end", (weight, start), (), started_by=0))
    )
    order = (0, 2, 1)
    assert precedence(problem, order, free={0, 2}) == {0: set(), 2: {0}, 1: {0, 2}}


def test_a_loop_is_one_unit_around_its_body() -> None:
    before = precedence(looping())
    assert before[5] == {0} and before[6] == {0, 5}
    assert before[3] >= {1, 2} and not before[2] & {0, 5, 6}
