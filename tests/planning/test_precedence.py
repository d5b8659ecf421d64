"""What stays in front of what."""

from __future__ import annotations

from itertools import permutations

from memplan.planning.legal import fault
from memplan.planning.precedence import precedence
from memplan.planning.schedule import runs
from tests.planning.small import fetching, looping, updating


def test_orders_that_keep_it_are_the_legal_ones() -> None:
    one = updating()
    before = precedence(one)
    for order in permutations(range(len(one.kernels))):
        kept = all(order.index(first) < order.index(unit) for unit, earlier in before.items() for first in earlier)
        assert kept == (fault(one, runs(order)) is None)


def test_nothing_crosses_an_asynchronous_pair() -> None:
    assert precedence(fetching()) == {0: set(), 1: {0}, 2: {0, 1}, 3: {0, 1, 2}}


def test_a_loop_is_one_unit_around_its_body() -> None:
    before = precedence(looping())
    assert before[5] == {0} and before[6] == {0, 5}
    assert before[3] >= {1, 2} and not before[2] & {0, 5, 6}
