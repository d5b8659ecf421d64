"""Values of a module while its buffers are found: which are the same, and which are one buffer by necessity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memplan.planning.problem import Role
from memplan.xla.shapes import Array, Shape

Tree = int | tuple["Tree", ...]  # numbers of values, in the structure of a shape


@dataclass
class Value:
    """What an instruction makes, or one leaf of that."""

    name: str
    array: Array
    role: Role
    maker: int | None  # number of a kernel
    first: int  # of those that are one buffer with it by necessity
    same: int | None = None  # the value that it turned out to be


class Values:
    """By number."""

    def __init__(self) -> None:
        self._values: list[Value] = []

    def __getitem__(self, number: int) -> Value:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, array: Array, role: Role, maker: int | None) -> int:
        self._values.append(Value(name, array, role, maker, len(self._values)))
        return len(self._values) - 1

    def add_like(self, tree: Tree, name: str) -> Tree:
        """A temporary for every leaf, `name{0}`, `name{1}`, ..., which no kernel makes yet."""
        first = len(self)
        return map_tree(
            tree, lambda one: self.add(f"{name}{{{len(self) - first}}}", self[one].array, Role.TEMPORARY, None)
        )

    def find(self, number: int) -> int:
        """The value that this one is."""
        while (same := self._values[number].same) is not None:
            number = same
        return number

    def first(self, number: int) -> int:
        """Of those that are one buffer with it."""
        number = self.find(number)
        while self._values[number].first != number:
            number = self.find(self._values[number].first)
        return number

    def unite(self, one: int, other: int) -> None:
        """Make them one buffer."""
        low, high = sorted((self.first(one), self.first(other)))
        self._values[high].first = low


def leaves_of(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for part in tree:
            yield from leaves_of(part)


def element_of(tree: Tree, index: int) -> Tree:
    assert isinstance(tree, tuple)
    return tree[index]


def tree_of(shape: Shape, make: Callable[[Array, str], int], index: str = "") -> Tree:
    """Of what is made of every array of a shape and its index, as `0,1`."""
    if isinstance(shape, Array):
        return make(shape, index.rstrip(","))
    return tuple(tree_of(part, make, f"{index}{i},") for i, part in enumerate(shape))


def map_tree(tree: Tree, make: Callable[[int], int]) -> Tree:
    return make(tree) if isinstance(tree, int) else tuple(map_tree(part, make) for part in tree)
