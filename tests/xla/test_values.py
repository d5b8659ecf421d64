"""Values that turn out to be one, and those that lie in one buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.problem import Role
from memplan.xla.buffers import Values, leaves_of, map_tree, tree_of
from memplan.xla.shapes import Array

ARRAY = Array("f32", (2,))


def values(count: int) -> Values:
    found = Values()
    for number in range(count):
        found.add(f"v{number}", ARRAY, Role.TEMPORARY, None)
    return found


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_what_is_united_has_one_first_the_lowest_of_them(pairs: list[tuple[int, int]]) -> None:
    found, groups = values(10), [{number} for number in range(10)]
    for one, other in pairs:
        found.unite(one, other)
        whole = groups[one] | groups[other]
        for member in whole:
            groups[member] = whole
    assert [found.first(number) for number in range(10)] == [min(group) for group in groups]


def test_a_value_that_is_another_lies_where_that_one_lies() -> None:
    found = values(4)
    found[2].same = 1
    found.unite(2, 3)
    assert (found.find(2), found.first(2), found.first(3)) == (1, 1, 1)


def test_trees_have_the_structure_of_a_shape() -> None:
    found, indices = values(0), list[str]()

    def make(array: Array, index: str) -> int:
        indices.append(index)
        return found.add(index, array, Role.TEMPORARY, None)

    tree = tree_of((ARRAY, (ARRAY, ARRAY)), make)
    assert (tree, indices) == ((0, (1, 2)), ["0", "1,0", "1,1"])
    like = found.add_like(tree, "loop")
    assert list(leaves_of(like)) == [3, 4, 5]
    assert [found[number].name for number in (3, 4, 5)] == ["loop{0}", "loop{1}", "loop{2}"]
    assert map_tree(tree, lambda number: number + 3) == like
