"""Overwrites: buffers and their versions, updates in place, and reads of lost versions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array, Shape, leaves

_UPDATES = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True, slots=True)
class ResultLeaf:
    """A leaf of an instruction's result."""

    instruction: str
    number: int


LeafTree = ResultLeaf | tuple["LeafTree", ...]


def tree_of(name: str, shape: Shape) -> LeafTree:
    """All leaves of an instruction's result, in the structure of its shape."""
    numbers = iter(range(10**6))

    def numbered(part: Shape) -> LeafTree:
        if isinstance(part, Array):
            return ResultLeaf(name, next(numbers))
        return tuple(numbered(element) for element in part)

    return numbered(shape)


def leaves_in(tree: LeafTree) -> Iterator[ResultLeaf]:
    if isinstance(tree, ResultLeaf):
        yield tree
    else:
        for element in tree:
            yield from leaves_in(element)


@dataclass(frozen=True)
class Loss:
    """A version of a buffer that was overwritten."""

    writer: str  # the instruction that overwrote it
    since: int  # its position
    version: ResultLeaf
    reads: Sequence[tuple[int, str]]  # of the version: position and reader


class Versions:
    """A value is a version of a buffer: an update in place is another version of the same buffer.

    Attributes:
      written: instruction -> the position from which on its results are written.
    """

    def __init__(self) -> None:
        self.written: dict[str, int] = {}
        self._reads: dict[ResultLeaf, list[tuple[int, str]]] = {}
        self._views: dict[ResultLeaf, ResultLeaf] = {}  # alias -> its version
        # versions -> the first version in the same buffer
        self._buffers: dict[ResultLeaf, ResultLeaf] = {}
        self._overwrites: list[tuple[str, ResultLeaf, int]] = []  # writer, version, position

    def buffer(self, leaf: ResultLeaf) -> ResultLeaf:
        """The first version in the buffer of this one."""
        version = self._version(leaf)
        return self._buffers.get(version, version)

    def _version(self, leaf: ResultLeaf) -> ResultLeaf:
        return self._views.get(leaf, leaf)

    def name(self, view: ResultLeaf, leaf: ResultLeaf) -> None:
        """Register an alias of a version."""
        self._views[view] = self._version(leaf)

    def read(self, leaf: ResultLeaf, position: int, reader: str) -> None:
        self._reads.setdefault(self._version(leaf), []).append((position, reader))

    def overwrite(
        self,
        leaf: ResultLeaf,
        position: int,
        writer: str,
        result: ResultLeaf | None = None,
    ) -> None:
        """Register that an instruction overwrites a version, by this result if that is known."""
        self._overwrites.append((writer, leaf, position))
        if result is not None:
            self._buffers[result] = self.buffer(leaf)

    def losses(self) -> Iterator[Loss]:
        """The versions lost by each overwrite."""
        versions: dict[ResultLeaf, list[ResultLeaf]] = {}
        for version in self._reads:
            versions.setdefault(self.buffer(version), []).append(version)
        for writer, leaf, since in self._overwrites:
            for version in versions.get(self.buffer(leaf), ()):
                if self.written[version.instruction] < since:
                    yield Loss(writer, since, version, self._reads[version])


class Updates:
    """The operands that instructions of a module overwrite."""

    def __init__(self, module: Module) -> None:
        self._module = module
        # fused computations -> leaf of the result, number of the parameter
        self._parameters: dict[str, list[tuple[int, int]]] = {}

    def of(
        self,
        op: Instruction,
        operands: Sequence[LeafTree],
    ) -> Iterator[tuple[int | None, ResultLeaf]]:
        """(number, buffer) pairs: the buffers that an instruction overwrites.

        The number is that of the result's leaf that is in the buffer afterwards, if that is known.
        """
        if op.opcode in ("fusion", "fusion-start"):
            first = _operand_leaves(operands) if op.opcode == "fusion-start" else 0
            for number, position in self._of_fused(op.called[0]):
                yield from ((first + number, buffer) for buffer in leaves_in(operands[position]))
        elif op.opcode == "while":
            unchanged = self.unchanged(op)
            for number, buffer in enumerate(leaves_in(operands[0])):
                if number not in unchanged:
                    yield number, buffer
        elif op.opcode == "conditional":
            for name, tree in zip(op.called, operands[1:], strict=True):
                yield from ((None, buffer) for buffer in self._within(name, [tree]))
        elif op.opcode == "call":
            yield from ((None, buffer) for buffer in self._within(op.called[0], operands))
        else:
            for number, position in _updated_operands(op):
                yield from ((number, buffer) for buffer in leaves_in(operands[position]))

    def unchanged(self, loop: Instruction) -> set[int]:
        """Leaves of a loop's state that its body returns unchanged."""
        body = self._module[loop.body]
        numbers: set[int] = set()
        for number, op in enumerate(body.results):
            source = body.ops[op.operands[0]] if op.opcode == "get-tuple-element" else None
            if source is not None and source.opcode == "parameter" and op.index == number:
                numbers.add(number)
        return numbers

    def _of_fused(self, name: str) -> list[tuple[int, int]]:
        if name not in self._parameters:
            self._parameters[name] = list(_updated_parameters(self._module[name]))
        return self._parameters[name]

    def _within(self, name: str, arguments: Sequence[LeafTree]) -> Iterator[ResultLeaf]:
        """The arguments' buffers that a computation overwrites."""
        body = self._module[name]
        buffers: dict[ResultLeaf, ResultLeaf] = {}  # leaves of parameters -> of arguments
        trees: dict[str, LeafTree] = {}
        for op in body.ops.values():
            operands = [trees[operand] for operand in op.operands]
            if op.opcode == "parameter":
                tree = tree_of(op.name, op.shape)
                argument = arguments[op.parameter_number]
                buffers.update(zip(leaves_in(tree), leaves_in(argument), strict=True))
            elif op.opcode in ("bitcast", "opt-barrier"):
                (tree,) = operands
            elif op.opcode == "get-tuple-element":
                (elements,) = operands
                assert not isinstance(elements, ResultLeaf)
                tree = elements[op.index]
            elif op.opcode == "tuple":
                tree = tuple(operands)
            else:
                tree = tree_of(op.name, op.shape)
                overwritten = (leaf for _, leaf in self.of(op, operands))
                yield from (buffers[leaf] for leaf in overwritten if leaf in buffers)
            trees[op.name] = tree


def _operand_leaves(operands: Sequence[LeafTree]) -> int:
    """Leaves of operands; the start of an asynchronous fusion lists them before its results."""
    return sum(len(list(leaves_in(tree))) for tree in operands)


def _updated_operands(op: Instruction) -> list[tuple[int, int]]:
    """(leaf, position): operands that an instruction updates in place, or a library adds to."""
    if op.opcode in _UPDATES:
        return [(0, 0)]
    pairs = op.aliased_outputs
    return [(_leaf_at(op.shape, index), position) for index, position in pairs]


def _leaf_at(shape: Shape, index: Sequence[int]) -> int:
    """The number of the leaf at an index of a shape, in order."""
    number = 0
    for element in index:
        assert not isinstance(shape, Array)
        number += sum(len(list(leaves(part))) for part in shape[:element])
        shape = shape[element]
    return number


def first_result(start: Instruction) -> int:
    """The first leaf of an asynchronous start that its end returns; operands stand before it."""
    if isinstance(start.shape, Array):
        return 0
    if start.opcode == "all-reduce-start" and isinstance(start.shape[0], Array):
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
                yield leaf, source.parameter_number
