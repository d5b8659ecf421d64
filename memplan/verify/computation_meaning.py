"""The meanings of a module's values on all devices: spread arrays over numbered expressions, equal for equal values."""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

from memplan.verify.dataflow import require
from memplan.verify.expressions import Expressions, ModuleExpressions
from memplan.verify.moves import SUMS, Moves, data, is_row_major
from memplan.verify.partition_numbers import PartitionNumbers
from memplan.verify.spreads import Spread, Spreads
from memplan.xla.module import Computation, Instruction, Module, predecessors
from memplan.xla.shapes import Array, Shape, leaves

_EFFECT = re.compile(r"\b(?:custom_call_)?has_side_effect=true")
_EFFECTS = re.compile(r"^(?:infeed|outfeed|send|send-done|recv|recv-done|rng|rng-get-and-update-state)$")
_RUN = frozenset({"call", "conditional", "while"})  # what they call may have effects
_COLLECTIVE = ("all-", "reduce-scatter", "collective-", "ragged-")
_CHANNEL = re.compile(r"channel_id=\d+(?:, )?")


class Stage(IntEnum):
    """How far a sum between hosts is whose terms are rounded."""

    EXACT = 0
    SENT = 1  # its terms are rounded
    SUMMED = 2  # they are added, in float32
    DONE = 3  # the sum is rounded


@dataclass(frozen=True)
class Value:
    """An array on all devices.

    Attributes:
      rounded: the exact elements that the array has up to rounding, from their first rounding until the sum is done.
      stage: of that sum; an array whose sum is done counts as exact, and may not be summed or rounded again.
    """

    shape: Array
    spread: Spread
    rounded: Spread | None = None
    stage: Stage = Stage.EXACT


Tree = Value | tuple["Tree", ...]


@dataclass
class Meanings:
    """Of both modules."""

    partitions: int
    spreads: Spreads = field(init=False)
    expressions: Expressions = field(default_factory=Expressions)

    def __post_init__(self) -> None:
        self.spreads = Spreads(self.partitions)

    def leaf(self, key: Hashable, shape: Array) -> Value:
        """An array that is an expression of its own."""
        return Value(shape, self.spreads.whole(self.expressions.number(key), shape.size, self.spreads.owners.own))

    def leaves(self, key: Hashable, shape: Shape) -> Tree:
        """The arrays of a shape."""
        found = (self.leaf((key, number), array) for number, array in enumerate(leaves(shape)))
        return shaped_as(shape, found)

    def meaning(self, tree: Tree) -> Hashable:
        """Equal for equal values of equal shapes."""
        if isinstance(tree, tuple):
            return tuple(map(self.meaning, tree))
        layout = "" if is_row_major(tree.shape) else tree.shape.layout
        return self.expressions.number((tree.shape.dtype, tree.shape.dims, layout, self.spreads.meaning(tree.spread)))


class ModuleMeaning:
    """A module's expressions.

    Attributes:
      expressions: how often each is computed.
      names: the instruction of each.
      barriers: what optimization barriers keep, how often.
    """

    def __init__(self, meanings: Meanings, module: Module, wire: str) -> None:
        """`wire` names a type to which sums may be rounded, or is empty."""
        self.all, self.module, self.wire = meanings, module, wire
        self.moves, self.text = Moves(module, meanings.spreads), ModuleExpressions(module, meanings.expressions)
        self.expressions: Counter[int] = Counter()
        self.names: dict[int, str] = {}
        self.barriers: Counter[Hashable] = Counter()
        self._called: dict[str, ComputationMeaning] = {}
        self.entry = ComputationMeaning(self, module.entry, {})

    def called(self, name: str) -> "ComputationMeaning":
        """A computation that is run instruction by instruction."""
        if name not in self._called:
            self._called[name] = ComputationMeaning(self, self.module[name], {})
        return self._called[name]


class ComputationMeaning:
    """The entry, a loop's body or condition, or a branch, as a function of its parameters.

    Attributes:
      outputs: the meanings of its results.
      arguments: shapes of its parameters, in order.
      effects: expressions with effects, in order.
      moved_sums: for the numbers of carries whose sums over devices count as made behind the loop, their owners.
    """

    def __init__(self, module: ModuleMeaning, body: Computation, sums: Mapping[str, int]) -> None:
        """`sums` maps additions to the number of the carry that they alone read and write."""
        self._module, self.body, self._all, self._sums = module, body, module.all, sums
        self._trees: dict[str, Tree] = {}
        self._known = PartitionNumbers(self._all.partitions)
        self.effects: list[int] = []
        self.moved_sums: dict[int, int] = {}
        for op in body.ops.values():
            for name in op.operands:
                require(name in self._trees, f"reads {name} in {op.name} before it is made")
            self._known.read(op)
            self._trees[op.name] = self._read(op)
        self.outputs = [self._all.meaning(tree) for tree in parts(self._trees[body.root.name])]
        self.arguments = [str(op.shape) for _, op in sorted(body.parameters.items())]

    @cached_property
    def meaning(self) -> int:
        key = ("computation", tuple(self.arguments), tuple(self.outputs), tuple(self.effects))
        return self._all.expressions.number(key)

    def _read(self, op: Instruction) -> Tree:
        operands = [self._trees[name] for name in op.operands]
        if op.opcode == "parameter":
            return self._all.leaves(("parameter", op.attributes), op.shape)
        if op.opcode == "tuple":
            return tuple(operands)
        if op.opcode == "get-tuple-element":
            (whole,) = operands
            require(isinstance(whole, tuple) and op.index < len(whole), f"takes in {op.name} what is no element")
            assert isinstance(whole, tuple)
            return whole[op.index]
        if op.opcode == "opt-barrier":
            self._module.barriers[self._all.meaning(operands[0])] += 1
            return operands[0]
        if op.opcode == "while":
            return self._loop(op, operands[0])
        if op.name in self._sums:
            return self._expression(op, self._before_sums(op, operands))
        return self._moved(op, operands)

    def _moved(self, op: Instruction, operands: Sequence[Tree]) -> Tree:
        """What an instruction moves or adds, or else the expression that it is."""
        given = [tree for name in data(op) if isinstance(tree := self._trees[name], Value)]
        if len(given) != len(data(op)):
            return self._expression(op, operands)
        spent = any(value.stage is Stage.DONE and value.rounded is None for value in given)
        exact = None if spent and op.opcode in SUMS else self._made(op, [value.spread for value in given])
        rounded, stage = self._rounded(op, given)
        if exact is None and rounded is None:
            return self._expression(op, operands)
        if rounded is not None and stage is Stage.DONE and op.result[0].dtype == "f32":
            exact, rounded, spent = rounded, None, True
        if exact is None:
            leaves_of = parts(self._all.leaves(self._number(op, operands), op.shape))
            exact = [leaf.spread for leaf in leaves_of]
        found = [
            Value(shape, spread, None, Stage.DONE if spent else Stage.EXACT)
            if rounded is None
            else Value(shape, spread, rounded[number], stage)
            for number, (shape, spread) in enumerate(zip(op.result, exact, strict=True))
        ]
        return shaped_as(op.shape, iter(found))

    def _made(self, op: Instruction, given: Sequence[Spread]) -> list[Spread] | None:
        made = self._module.moves.made(op, self.body, given, self._known)
        found = [one for one in made or () if one is not None]
        return found if made is not None and len(found) == len(made) else None

    def _rounded(self, op: Instruction, given: Sequence[Value]) -> tuple[list[Spread] | None, Stage]:
        """The exact elements of a sum whose terms are rounded, and how far it is; None if there is none."""
        if not self._module.wire or not given:
            return None, Stage.EXACT
        if op.opcode in ("convert", "bitcast-convert"):
            return self._converted(op, given[0])
        spreads = [value.rounded for value in given if value.rounded is not None]
        stages = {value.stage for value in given}
        if len(spreads) != len(given):
            return None, Stage.EXACT
        if op.opcode in SUMS:
            adds = op.result[0].dtype == "f32" and stages <= {Stage.SENT, Stage.SUMMED}
            return self._made(op, spreads) if adds else None, Stage.SUMMED
        return self._made(op, spreads) if len(stages) == 1 else None, min(stages)

    def _converted(self, op: Instruction, given: Value) -> tuple[list[Spread] | None, Stage]:
        before, after = given.shape.dtype, op.result[0].dtype
        wire, stage, rounded = self._module.wire, given.stage, given.rounded
        if given.shape.dims != op.result[0].dims or "control-predecessors" in op.attributes:
            return None, stage
        if op.opcode == "convert" and (before, after) == ("f32", wire):
            if rounded is None and stage is Stage.EXACT:
                return [given.spread], Stage.SENT
            return ([rounded], Stage.DONE) if rounded is not None and stage is Stage.SUMMED else (None, stage)
        bits = op.opcode == "bitcast-convert" and {before, after} == {wire, "u16"}
        back = op.opcode == "convert" and (before, after) == (wire, "f32")
        return ([rounded] if rounded is not None and (bits or back) else None), stage

    def _loop(self, op: Instruction, start: Tree) -> Tree:
        """A loop; sums over devices that it only adds up count as made behind it."""
        body, condition = (self._module.module[op.attribute(name).lstrip("%")] for name in ("body", "condition"))
        sums: dict[str, int] = {}
        for name, number in accumulations(body, condition).items():
            carried = start[number] if isinstance(start, tuple) else None
            if isinstance(carried, Value) and self._all.spreads.is_zero(carried.spread):
                sums[name] = number
        inner, until = ComputationMeaning(self._module, body, sums), self._module.called(condition.name)
        called = (until.meaning, inner.meaning)
        tree = self._expression(op, [start], called, bool(inner.effects or until.effects))
        if not inner.moved_sums:
            return tree
        assert isinstance(tree, tuple)
        found = list(tree)
        for number, owners in inner.moved_sums.items():
            value = found[number]
            assert isinstance(value, Value)
            source = value.spread.rows[0][0].source
            found[number] = Value(value.shape, self._all.spreads.whole(source, value.shape.size, owners))
        return tuple(found)

    def _before_sums(self, op: Instruction, operands: Sequence[Tree]) -> list[Tree]:
        """The operands of an addition to a carry, before the sum over devices that it adds."""
        spreads, found = self._all.spreads, list[Tree]()
        for tree in operands:
            if isinstance(tree, Value) and not spreads.is_own(tree.spread):
                owners = spreads.sum_of(tree.spread)
                if owners is not None:
                    self.moved_sums[self._sums[op.name]] = owners
                    tree = Value(tree.shape, spreads.before_sum(tree.spread))
            found.append(tree)
        return found

    def _expression(
        self, op: Instruction, operands: Sequence[Tree], called: tuple[int, ...] | None = None, inside: bool = False
    ) -> Tree:
        """An expression of its own; `inside` says whether what it calls has effects."""
        if called is None and op.opcode in ("call", "conditional"):
            computations = [self._module.called(name) for name in op.called]
            called = tuple(one.meaning for one in computations)
            inside = any(one.effects for one in computations)
        has_effect = inside or bool(_EFFECTS.match(op.opcode) or _EFFECT.search(op.attributes))
        number = self._number(op, operands, called, len(self.effects) if has_effect else -1)
        self._module.expressions[number] += 1
        self._module.names.setdefault(number, op.name)
        if has_effect:
            self.effects.append(number)
        return self._all.leaves(number, op.shape)

    def _number(
        self, op: Instruction, operands: Sequence[Tree], called: tuple[int, ...] | None = None, effect: int = -1
    ) -> int:
        """The number of an instruction's expression; of two with effects each has its own."""
        text = self._module.text
        opcode, shapes, said, calls = text.stated(op, text.called(op) if called is None else called)
        if op.opcode.startswith(_COLLECTIVE):
            said = _CHANNEL.sub("", str(said))
        large = (op.name, op.attributes) if op.opcode == "constant" and "{...}" in op.attributes else ()
        after = frozenset(self._all.meaning(self._before(name, op)) for name in predecessors(op))
        given = tuple(self._all.meaning(tree) for tree in operands)
        return self._all.expressions.number((opcode, shapes, said, calls, large, after, given, effect))

    def _before(self, name: str, op: Instruction) -> Tree:
        require(name in self._trees, f"waits in {op.name} for {name}, which comes later")
        return self._trees[name]


def acts(op: Instruction) -> bool:
    """Does an instruction have effects, or may what it runs have them?"""
    return op.opcode in _RUN or bool(_EFFECTS.match(op.opcode) or _EFFECT.search(op.attributes))


def accumulations(body: Computation, condition: Computation) -> dict[str, int]:
    """Additions of a loop to carries that nothing else reads or writes, and the numbers of those."""
    reads = Counter(_elements(body))
    read_by_condition = set(_elements(condition))
    if body.root.opcode != "tuple" or WHOLE in reads or WHOLE in read_by_condition:
        return {}
    found: dict[str, int] = {}
    for number, name in enumerate(body.root.operands):
        op = body.ops[name]
        carried = [one for one in op.operands if _is_element(body, one, number) and len(body.uses[one]) == 1]
        alone = reads[number] == 1 and number not in read_by_condition and len(body.uses[name]) == 1
        if op.opcode == "add" and len(carried) == 1 and alone and "control-predecessors" not in op.attributes:
            found[name] = number
    return found


WHOLE = -1  # of a loop's parameter, rather than one of its elements


def _elements(body: Computation) -> Iterator[int]:
    """Which elements of its parameter a computation reads, one by one."""
    for user, _ in body.uses[body.parameters[0].name]:
        yield user.index if user.opcode == "get-tuple-element" else WHOLE


def _is_element(body: Computation, name: str, number: int) -> bool:
    op = body.ops[name]
    return op.opcode == "get-tuple-element" and op.operands[0] == body.parameters[0].name and op.index == number


def parts(tree: Tree) -> list[Value]:
    """The arrays of a tree, in order."""
    return [tree] if isinstance(tree, Value) else [value for part in tree for value in parts(part)]


def shaped_as(shape: Shape, values: Iterator[Value]) -> Tree:
    """Arrays as a tree of this shape."""
    return next(values) if isinstance(shape, Array) else tuple(shaped_as(part, values) for part in shape)
