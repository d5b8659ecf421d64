"""Linear programs against trying everything."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.planning.linear import LinearProgram

ITEMS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(0, 60))
def test_a_knapsack_is_solved(items: list[tuple[int, int]], need: int) -> None:
    program = LinearProgram()
    chosen = [program.choice(cost) for cost, _ in items]
    program.at_least(need, zip(chosen, (gain for _, gain in items), strict=True))
    solution = program.solve(10.0, 0.0)
    costs = [
        sum(cost for (cost, _), one in zip(items, take, strict=True) if one)
        for take in product((0, 1), repeat=len(items))
        if sum(gain for (_, gain), one in zip(items, take, strict=True) if one) >= need
    ]
    if not costs:
        assert solution.values is None
        return
    assert solution.values is not None
    found = sum(cost for (cost, _), value in zip(items, solution.values, strict=True) if value > 0.5)
    assert found == min(costs)
    assert solution.bound == pytest.approx(found)


def test_a_share_follows_and_an_excess_pays() -> None:
    program = LinearProgram()
    first, second, follows, over = program.choice(), program.choice(), program.share(3.0), program.excess(10.0)
    program.at_least(1, [(first, 1)])
    program.implies(first, [follows])
    program.implies(second, [first])
    program.at_least(-1.5, [(over, 1), (first, -2)])
    solution = program.solve(10.0, 0.0)
    assert solution.values is not None
    assert solution.values.tolist() == pytest.approx([1, solution.values[1], 1, 0.5])
    assert solution.bound == pytest.approx(8.0)


def test_no_variables_cost_nothing() -> None:
    assert LinearProgram().solve(1.0, 0.0).bound == 0.0
