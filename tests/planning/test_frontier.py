"""The last size that fits, against trying them all."""

import math

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.frontier import last_fitting


def found(
    floors: list[int], needs: list[int], budget: int, predicted: float, at_first: list[int] | None = None
) -> tuple[int, list[tuple[int, bool]], int]:
    """What is found; sizes that were tried and whether thoroughly, in order; how many floors were asked for."""
    tried: list[tuple[int, bool]] = []
    asked: set[int] = set()

    def floor(size: int) -> int:
        asked.add(size)
        return floors[size]

    def trial(size: int, thorough: bool) -> tuple[bool, int]:
        tried.append((size, thorough))
        needed = (needs if thorough else at_first or needs)[size]
        return needed <= budget, needed

    last = last_fitting(len(floors), budget, floor, lambda size: int(predicted * floors[size]), trial)
    return last, tried, len(asked)


@given(
    steps=st.lists(st.tuples(st.integers(0, 50), st.floats(1, 3)), min_size=1, max_size=100),
    budget=st.integers(0, 3000),
    predicted=st.floats(0.2, 5),
    hidden=st.floats(1, 1.5),
)
def test_it_is_the_last_that_fits_and_both_sides_of_it_were_tried(
    steps: list[tuple[int, float]], budget: int, predicted: float, hidden: float
) -> None:
    floors, needs = [0], [0]
    for more, times in steps:
        floors.append(floors[-1] + more)
        needs.append(max(needs[-1], int(times * floors[-1])))
    last, tried, _ = found(floors, needs, budget, predicted, [int(hidden * need) for need in needs])
    assert last == max((size for size, need in enumerate(needs) if need <= budget), default=-1)
    assert last in {size for size, _ in tried}
    assert (last + 1, True) in tried or last + 1 == len(needs)
    halvings = math.ceil(math.log2(len(needs) + 1))
    assert len(tried) == len(set(tried)) <= 4 + halvings + 2 * halvings
    assert sum(not thorough for _, thorough in tried) <= 4 + halvings


@given(budget=st.integers(1, 5000), times=st.floats(1, 3), off=st.floats(0.95, 1.05))
def test_a_good_prediction_makes_few_trials(budget: int, times: float, off: float) -> None:
    floors = [size**2 for size in range(1, 65)]
    needs = [int(times * floor) for floor in floors]
    _, tried, asked = found(floors, needs, budget, times * off)
    assert len({size for size, _ in tried}) <= 4
    assert sum(thorough for _, thorough in tried) <= 1
    assert asked <= 16


def test_nothing_fits() -> None:
    assert found([10, 20], [15, 30], 12, 1.5)[:2] == (-1, [(0, False), (0, True)])


def test_what_fits_below_its_floor_is_found_all_the_same() -> None:
    assert found([10, 20, 30], [10, 11, 12], 11, 1.0)[0] == 1
