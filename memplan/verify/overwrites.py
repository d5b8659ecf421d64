"""Overwrites: buffers and their versions, updates in place, and reads of a version that is gone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape, leaves

_ADDED = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, [a-z]|$)")
_PAIR = re.compile(r"\{([\d, ]*)\}: \((\d+), \{\}\)")
_UPDATES = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf of an instruction's result."""

    maker: str
    leaf: int


Tree = Place | tuple["Tree", ...]


def tree_of(name: str, shape: Shape) -> Tree:
    """Places of all leaves of an instruction's result, in the structure of its shape."""
    numbers = iter(range(10**6))

    def places(part: Shape) -> Tree:
        return Place(name, next(numbers)) if isinstance(part, Array) else tuple(places(one) for one in part)

    return places(shape)


def places_in(tree: Tree) -> Iterator[Place]:
    if isinstance(tree, Place):
        yield tree
    else:
        for part in tree:
            yield from places_in(part)


@dataclass(frozen=True)
class Loss:
    """A version of a buffer that was overwritten."""

    writer: str  # the instruction that overwrote it; since: its position
    since: int
    version: Place
    reads: Sequence[tuple[int, str]]  # reads of the version: position and reader


class Versions:
    """A value is a version of a buffer: an update in place is another version of the same buffer.

    Attributes:
      made: instruction -> the position from which on its results are written.
    """

    def __init__(self) -> None:
        self.made: dict[str, int] = {}
        self._reads: dict[Place, list[tuple[int, str]]] = {}
        self._views: dict[Place, Place] = {}  # alias -> its version
        self._buffers: dict[Place, Place] = {}  # versions -> the first version in the same buffer
        self._overwritten: list[tuple[str, Place, int]] = []

    def buffer(self, place: Place) -> Place:
        """The first version in the buffer of this one."""
        version = self._version(place)
        return self._buffers.get(version, version)

    def _version(self, place: Place) -> Place:
        return self._views.get(place, place)

    def name(self, view: Place, place: Place) -> None:
        """Register an alias of a version."""
        self._views[view] = self._version(place)

    def read(self, place: Place, position: int, reader: str) -> None:
        self._reads.setdefault(self._version(place), []).append((position, reader))

    def overwrite(self, place: Place, position: int, writer: str, result: Place | None = None) -> None:
        """Overwritten by this result of the instruction, if it is known."""
        self._overwritten.append((writer, place, position))
        if result is not None:
            self._buffers[result] = self.buffer(place)

    def losses(self) -> Iterator[Loss]:
        """The versions lost by each overwrite."""
        versions: dict[Place, list[Place]] = {}
        for version in self._reads:
            versions.setdefault(self.buffer(version), []).append(version)
        for writer, place, since in self._overwritten:
            for version in versions.get(self.buffer(place), ()):
                if self.made[version.maker] < since:
                    yield Loss(writer, since, version, self._reads[version])


class Updates:
    """The operands that instructions of a module overwrite."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._parameters: dict[str, list[tuple[int, int]]] = {}  # of fused computations: leaf, number

    def of(self, op: Instruction, operands: Sequence[Tree]) -> Iterator[tuple[int | None, Place]]:
        """(leaf, buffer): the overwritten buffer, and the leaf of the result that is in it afterwards, if that is
        known.
        """
        if op.opcode in ("fusion", "fusion-start"):
            # the start of an asynchronous fusion lists its operands, then its results
            first = sum(len(list(places_in(tree))) for tree in operands) if op.opcode == "fusion-start" else 0
            for leaf, number in self._of_fused(op.called[0]):
                yield from ((first + leaf, place) for place in places_in(operands[number]))
        elif op.opcode == "while":
            unchanged = self.unchanged(op)
            state = enumerate(places_in(operands[0]))
            yield from ((number, place) for number, place in state if number not in unchanged)
        elif op.opcode == "conditional":
            for name, tree in zip(op.called, operands[1:], strict=True):
                yield from ((None, place) for place in self._within(name, [tree]))
        elif op.opcode == "call":
            yield from ((None, place) for place in self._within(op.called[0], operands))
        else:
            for leaf, position in _updated_operands(op):
                yield from ((leaf, place) for place in places_in(operands[position]))

    def unchanged(self, loop: Instruction) -> set[int]:
        """Leaves of a loop's state that its body returns unchanged."""
        found, body = set(), self._module[loop.attribute("body").lstrip("%")]
        for number, op in enumerate(body.results):
            source = body.ops[op.operands[0]] if op.opcode == "get-tuple-element" else None
            if source is not None and source.opcode == "parameter" and op.index == number:
                found.add(number)
        return found

    def _of_fused(self, name: str) -> list[tuple[int, int]]:
        if name not in self._parameters:
            self._parameters[name] = list(_updated_parameters(self._module[name]))
        return self._parameters[name]

    def _within(self, name: str, given: Sequence[Tree]) -> Iterator[Place]:
        """The parameters' buffers that a computation overwrites."""
        body = self._module[name]
        inner: dict[Place, Place] = {}
        trees: dict[str, Tree] = {}
        for op in body.ops.values():
            operands = [trees[operand] for operand in op.operands]
            if op.opcode == "parameter":
                tree = tree_of(op.name, op.shape)
                inner.update(zip(places_in(tree), places_in(given[int(op.attributes)]), strict=True))
            elif op.opcode in ("bitcast", "opt-barrier"):
                (tree,) = operands
            elif op.opcode == "get-tuple-element":
                (parts,) = operands
                assert not isinstance(parts, Place)
                tree = parts[op.index]
            elif op.opcode == "tuple":
                tree = tuple(operands)
            else:
                tree = tree_of(op.name, op.shape)
                yield from (inner[place] for _, place in self.of(op, operands) if place in inner)
            trees[op.name] = tree


def _updated_operands(op: Instruction) -> list[tuple[int, int]]:
    """(leaf, position): the operands that an instruction updates in place, or a library adds to."""
    if op.opcode in _UPDATES:
        return [(0, 0)]
    found = _ADDED.search(op.attributes)
    pairs = _PAIR.findall(found[1]) if found else ()
    return [(_leaf_at(op.shape, [int(one) for one in index.split(",") if one]), int(at)) for index, at in pairs]


def _leaf_at(shape: Shape, index: Sequence[int]) -> int:
    """The number of the leaf at an index of a shape, in order."""
    before = 0
    for one in index:
        assert not isinstance(shape, Array)
        before += sum(len(list(leaves(part))) for part in shape[:one])
        shape = shape[one]
    return before


def first_result(start: Instruction) -> int:
    """The first leaf of the start of an asynchronous pair that the end gives; operands are in front of it."""
    if isinstance(start.shape, Array) or (start.opcode == "all-reduce-start" and isinstance(start.shape[0], Array)):
        return 0
    return len(list(leaves(start.shape[0])))


def _updated_parameters(fused: Computation) -> Iterator[tuple[int, int]]:
    """(leaf, number): the parameters whose updates a fusion returns."""
    for leaf, result in enumerate(fused.by_leaf):
        while result.opcode in ("bitcast", "get-tuple-element"):
            result = fused.ops[result.operands[0]]
        for _, position in _updated_operands(result):
            source = fused.behind_bitcasts(fused.ops[result.operands[position]])
            if source.opcode == "parameter":
                yield leaf, int(source.attributes)
