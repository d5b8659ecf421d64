"""Values that turn out to be one, and those that lie in one buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.planning.problem import Role
from memplan.xla.buffers import Values, leaves_of, map_tree, tree_of
from memplan.xla.shapes import Array

ARRAY = Array("f32", (2,))


def values(count: int) -> Values:
    table = Values()
    for number in range(count):
        table.add(f"v{number}", ARRAY, Role.TEMPORARY, None)
    return table


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_what_is_united_has_one_first_the_lowest_of_them(pairs: list[tuple[int, int]]) -> None:
    table, groups = values(10), [{number} for number in range(10)]
    for first, second in pairs:
        table.unite(first, second)
        whole = groups[first] | groups[second]
        for member in whole:
            groups[member] = whole
    assert [table.first(number) for number in range(10)] == [min(group) for group in groups]


def test_a_value_that_is_another_lies_where_that_one_lies() -> None:
    table = values(4)
    table[2].same = 1
    table.unite(2, 3)
    assert (table.find(2), table.first(2), table.first(3)) == (1, 1, 1)


def test_trees_have_the_structure_of_a_shape() -> None:
    table, indices = values(0), list[str]()

    def make(array: Array, index: str) -> int:
        indices.append(index)
        return table.add(index, array, Role.TEMPORARY, None)

    tree = tree_of((ARRAY, (ARRAY, ARRAY)), make)
    assert (tree, indices) == ((0, (1, 2)), ["0", "1,0", "1,1"])
    like = table.add_like(tree, "loop")
    assert list(leaves_of(like)) == [3, 4, 5]
    assert [table[number].name for number in (3, 4, 5)] == ["loop{0}", "loop{1}", "loop{2}"]
    assert map_tree(tree, lambda number: number + 3) == like
