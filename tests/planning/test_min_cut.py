"""Minimum cuts against every set of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.min_cut import chosen

SIZE, SOURCE, SINK = 7, 5, 6
NODES = st.integers(0, SIZE - 3)
COSTS = st.lists(st.tuples(NODES, NODES | st.just(SINK), st.integers(0, 9).map(float)), min_size=1, max_size=9)
BONDS = st.lists(st.tuples(NODES | st.just(SOURCE), NODES), min_size=1, max_size=6)


def paid(side: Sequence[bool], costs: Sequence[tuple[int, int, float]]) -> float:
    return sum(seconds for start, end, seconds in costs if side[start] and not side[end])


def sides(bonds: Sequence[tuple[int, int]]) -> Any:
    for some in product([False, True], repeat=SIZE - 2):
        side = [*some, True, False]
        if all(side[end] or not side[start] for start, end in bonds):
            yield side


@given(COSTS, BONDS, st.sampled_from([1.0, 1e-6, 1e6]))
def test_no_set_that_keeps_the_bonds_costs_less(costs: Any, bonds: Any, unit: float) -> None:
    costs = [(start, end, seconds * unit) for start, end, seconds in costs]
    found = chosen(SIZE, SOURCE, SINK, costs, bonds).tolist()
    assert found in list(sides(bonds))
    assert paid(found, costs) == pytest.approx(min(paid(side, costs) for side in sides(bonds)), rel=1e-6)


def test_bonds_hold_however_often_they_are_given() -> None:
    """They were added up, beyond what an int32 holds, and held no more."""
    for times in (1, 2, 3):
        found = chosen(4, 0, 3, [(1, 2, 9.0), (2, 3, 1.0)], [(0, 1)] * times + [(1, 2)] * times)
        assert found.tolist() == [True, True, True, False]
