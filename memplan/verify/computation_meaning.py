"""The meanings of a module's values on all devices: spread arrays over numbered expressions.

Equal values of two modules have equal meanings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from memplan.verify.dataflow import require
from memplan.verify.expressions import Expressions, ModuleExpressions
from memplan.verify.moves import SUMS, Moves, data
from memplan.verify.partition_numbers import PartitionNumbers
from memplan.verify.spreads import Spread, Spreads
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import NO_LAYOUT, Array, Shape, leaves

_EFFECTS = frozenset(
    """
    infeed outfeed send send-done recv recv-done rng rng-get-and-update-state
    """.split()  # noqa: SIM905
)
_RUN = frozenset({"call", "conditional", "while"})  # the computations they call may have effects
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-")  # how their opcodes begin


class WireStage(IntEnum):
    """How far a sum is whose terms are sent between hosts in a rounded type."""

    EXACT = 0  # there is no such sum
    SENT = 1  # its terms are rounded
    SUMMED = 2  # they are added, in float32
    DONE = 3  # the sum is rounded


@dataclass(frozen=True)
class SpreadArray:
    """An array on all devices.

    Attributes:
      rounded: the exact elements that the array has up to rounding, from their first rounding until
        the sum is done; else None.
      stage: of that sum.
    """

    shape: Array
    spread: Spread
    rounded: Spread | None = None
    stage: WireStage = WireStage.EXACT

    @property
    def is_finished_sum(self) -> bool:
        """Is it such a sum that is done? It counts as exact, and may not be summed or rounded."""
        return self.stage is WireStage.DONE and self.rounded is None


ArrayTree = SpreadArray | tuple["ArrayTree", ...]


class _RoundedSum(NamedTuple):
    """Results of an instruction that takes part in a sum whose terms are rounded."""

    spreads: list[Spread]  # the exact elements of each
    stage: WireStage


@dataclass
class Meanings:
    """Meanings of both modules."""

    partitions: int
    spreads: Spreads = field(init=False)
    expressions: Expressions = field(default_factory=Expressions)

    def __post_init__(self) -> None:
        self.spreads = Spreads(self.partitions)

    def leaf(self, key: Hashable, shape: Array) -> SpreadArray:
        """An array that is an expression of its own."""
        source = self.expressions.number(key)
        return SpreadArray(shape, self.spreads.whole(source, shape.size, self.spreads.owners.own))

    def leaves(self, key: Hashable, shape: Shape) -> ArrayTree:
        """The arrays of a shape."""
        arrays = (self.leaf((key, number), array) for number, array in enumerate(leaves(shape)))
        return shaped_as(shape, arrays)

    def meaning(self, tree: ArrayTree) -> Hashable:
        """Equal for equal values of equal shapes."""
        if isinstance(tree, tuple):
            return tuple(map(self.meaning, tree))
        shape = tree.shape
        layout = NO_LAYOUT if shape.is_row_major else shape.layout
        elements = self.spreads.meaning(tree.spread)
        return self.expressions.number((shape.dtype, shape.dims, layout, elements))


class ModuleMeaning:
    """A module's expressions.

    Attributes:
      expressions: how often each is computed.
      names: the instruction of each.
      barriers: the meanings that optimization barriers keep, and how often each is kept.
    """

    def __init__(self, meanings: Meanings, module: Module, wire: str) -> None:
        """`wire` names a type to which sums may be rounded, or is empty."""
        self.meanings = meanings
        self.module = module
        self.wire = wire
        self.moves = Moves(module, meanings.spreads)
        self.stated = ModuleExpressions(module, meanings.expressions)
        self.expressions: Counter[int] = Counter()
        self.names: dict[int, str] = {}
        self.barriers: Counter[Hashable] = Counter()
        self._called: dict[str, ComputationMeaning] = {}
        self.entry = ComputationMeaning(self, module.entry, {})

    def called(self, name: str) -> ComputationMeaning:
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
      moved_sums: carries whose sums over devices count as made behind the loop -> their owners.
    """

    def __init__(self, module: ModuleMeaning, body: Computation, sums: Mapping[str, int]) -> None:
        """`sums` maps additions to the number of the carry that they alone read and write."""
        self._module = module
        self.body = body
        self._meanings = module.meanings
        self._sums = sums
        self._trees: dict[str, ArrayTree] = {}
        self._numbers = PartitionNumbers(module.meanings.partitions)
        self.effects: list[int] = []
        self.moved_sums: dict[int, int] = {}
        for op in body.ops.values():
            for name in op.operands:
                require(name in self._trees, f"reads {name} in {op.name} before it is made")
            self._numbers.read(op)
            self._trees[op.name] = self._read(op)
        results = arrays_in(self._trees[body.root.name])
        self.outputs = [self._meanings.meaning(array) for array in results]
        self.arguments = [op.shape for _, op in sorted(body.parameters.items())]

    @cached_property
    def meaning(self) -> int:
        key = "computation", tuple(self.arguments), tuple(self.outputs), tuple(self.effects)
        return self._meanings.expressions.number(key)

    def _read(self, op: Instruction) -> ArrayTree:
        operands = [self._trees[name] for name in op.operands]
        if op.opcode == "parameter":
            return self._meanings.leaves(("parameter", op.parameter_number), op.shape)
        if op.opcode == "tuple":
            return tuple(operands)
        if op.opcode == "get-tuple-element":
            (whole,) = operands
            is_element = isinstance(whole, tuple) and op.index < len(whole)
            require(is_element, f"takes in {op.name} what is no element")
            assert isinstance(whole, tuple)
            return whole[op.index]
        if op.opcode == "opt-barrier":
            self._module.barriers[self._meanings.meaning(operands[0])] += 1
            return operands[0]
        if op.opcode == "while":
            return self._loop(op, operands[0])
        if op.name in self._sums:
            return self._expression(op, self._before_sums(op, operands))
        return self._moved(op, operands)

    def _moved(self, op: Instruction, operands: Sequence[ArrayTree]) -> ArrayTree:
        """The arrays that an instruction moves or adds, or else the expression that it is."""
        trees = [self._trees[name] for name in data(op)]
        arrays = [tree for tree in trees if isinstance(tree, SpreadArray)]
        if len(arrays) != len(trees):
            return self._expression(op, operands)
        finished = any(array.is_finished_sum for array in arrays)
        sums_again = finished and op.opcode in SUMS
        spreads = None if sums_again else self._spreads(op, [array.spread for array in arrays])
        rounded = self._rounded(op, arrays)
        if rounded is None:
            if spreads is None:
                return self._expression(op, operands)
            stage = WireStage.DONE if finished else WireStage.EXACT
            return self._arrays(op, spreads, stage)
        if rounded.stage is WireStage.DONE and op.result[0].dtype == "f32":
            return self._arrays(op, rounded.spreads, WireStage.DONE)
        if spreads is None:
            own = self._meanings.leaves(self._number(op, operands), op.shape)
            spreads = [array.spread for array in arrays_in(own)]
        return self._arrays(op, spreads, rounded.stage, rounded.spreads)

    def _arrays(
        self,
        op: Instruction,
        spreads: Sequence[Spread],
        stage: WireStage,
        rounded: Sequence[Spread] | None = None,
    ) -> ArrayTree:
        """The results of an instruction, leaf by leaf."""
        sums = [None] * len(spreads) if rounded is None else rounded
        leaves_of = zip(op.result, spreads, sums, strict=True)
        arrays = (SpreadArray(shape, spread, exact, stage) for shape, spread, exact in leaves_of)
        return shaped_as(op.shape, arrays)

    def _spreads(self, op: Instruction, operands: Sequence[Spread]) -> list[Spread] | None:
        """The elements of the results; None where the instruction moves or adds none."""
        results = self._module.moves.spread(op, self.body, operands, self._numbers)
        spreads = [spread for spread in results or () if spread is not None]
        return spreads if results is not None and len(spreads) == len(results) else None

    def _rounded(self, op: Instruction, arrays: Sequence[SpreadArray]) -> _RoundedSum | None:
        """The sum with rounded terms in which an instruction takes part."""
        if not self._module.wire or not arrays:
            return None
        if op.opcode in ("convert", "bitcast-convert"):
            return self._converted(op, arrays[0])
        terms = [array.rounded for array in arrays if array.rounded is not None]
        if len(terms) != len(arrays):
            return None
        stages = {array.stage for array in arrays}
        if op.opcode in SUMS:
            may_sum = stages <= {WireStage.SENT, WireStage.SUMMED}
            if op.result[0].dtype != "f32" or not may_sum:
                return None
            stage = WireStage.SUMMED
        elif len(stages) == 1:
            (stage,) = stages
        else:
            return None
        spreads = self._spreads(op, terms)
        return None if spreads is None else _RoundedSum(spreads, stage)

    def _converted(self, op: Instruction, array: SpreadArray) -> _RoundedSum | None:
        """The sum that a conversion to the wire's type begins or ends, or passes on."""
        if array.shape.dims != op.result[0].dims or op.predecessors:
            return None
        before, after = array.shape.dtype, op.result[0].dtype
        wire, stage, rounded = self._module.wire, array.stage, array.rounded
        if op.opcode == "convert" and (before, after) == ("f32", wire):
            if rounded is None:
                is_exact = stage is WireStage.EXACT
                return _RoundedSum([array.spread], WireStage.SENT) if is_exact else None
            is_summed = stage is WireStage.SUMMED
            return _RoundedSum([rounded], WireStage.DONE) if is_summed else None
        if rounded is None:
            return None
        takes_bits = op.opcode == "bitcast-convert" and {before, after} == {wire, "u16"}
        widens = op.opcode == "convert" and (before, after) == (wire, "f32")
        return _RoundedSum([rounded], stage) if takes_bits or widens else None

    def _loop(self, op: Instruction, start: ArrayTree) -> ArrayTree:
        """A loop; sums over devices that it only adds up count as made behind it."""
        body = self._module.module[op.body]
        condition = self._module.module[op.condition]
        sums: dict[str, int] = {}
        for name, number in accumulations(body, condition).items():
            carry = start[number] if isinstance(start, tuple) else None
            if isinstance(carry, SpreadArray) and self._meanings.spreads.is_zero(carry.spread):
                sums[name] = number
        trip = ComputationMeaning(self._module, body, sums)
        test = self._module.called(condition.name)
        has_effects = bool(trip.effects or test.effects)
        tree = self._expression(op, [start], (test.meaning, trip.meaning), has_effects)
        if not trip.moved_sums:
            return tree
        assert isinstance(tree, tuple)
        results = list(tree)
        for number, owners in trip.moved_sums.items():
            carry = results[number]
            assert isinstance(carry, SpreadArray)
            source = carry.spread.rows[0][0].source
            total = self._meanings.spreads.whole(source, carry.shape.size, owners)
            results[number] = SpreadArray(carry.shape, total)
        return tuple(results)

    def _before_sums(self, op: Instruction, operands: Sequence[ArrayTree]) -> list[ArrayTree]:
        """The operands of an addition to a carry, before the sum over devices that it adds."""
        spreads = self._meanings.spreads
        terms: list[ArrayTree] = []
        for tree in operands:
            term = tree
            if isinstance(tree, SpreadArray) and not spreads.is_own(tree.spread):
                owners = spreads.sum_of(tree.spread)
                if owners is not None:
                    self.moved_sums[self._sums[op.name]] = owners
                    term = SpreadArray(tree.shape, spreads.before_sum(tree.spread))
            terms.append(term)
        return terms

    def _expression(
        self,
        op: Instruction,
        operands: Sequence[ArrayTree],
        called: tuple[int, ...] | None = None,
        calls_effects: bool = False,
    ) -> ArrayTree:
        """An expression of its own.

        Args:
          called: the meanings of the computations that it runs; by default they are read here.
          calls_effects: do they have effects?
        """
        if called is None and op.opcode in ("call", "conditional"):
            computations = [self._module.called(name) for name in op.called]
            called = tuple(computation.meaning for computation in computations)
            calls_effects = any(computation.effects for computation in computations)
        has_effect = calls_effects or _has_effect(op)
        number = self._number(op, operands, called, len(self.effects) if has_effect else -1)
        self._module.expressions[number] += 1
        self._module.names.setdefault(number, op.name)
        if has_effect:
            self.effects.append(number)
        return self._meanings.leaves(number, op.shape)

    def _number(
        self,
        op: Instruction,
        operands: Sequence[ArrayTree],
        called: tuple[int, ...] | None = None,
        effect: int = -1,
    ) -> int:
        """The number of an instruction's expression; of two with effects each has its own."""
        module = self._module
        callees = module.stated.called(op) if called is None else called
        stated = module.stated.stated(op, callees)
        if op.opcode.startswith(_COLLECTIVES):
            stated = stated._replace(channel=None)
        awaited = [self._before(name, op) for name in op.predecessors]
        after = frozenset(map(self._meanings.meaning, awaited))
        sources = tuple(self._meanings.meaning(tree) for tree in operands)
        return self._meanings.expressions.number((stated, after, sources, effect))

    def _before(self, name: str, op: Instruction) -> ArrayTree:
        require(name in self._trees, f"waits in {op.name} for {name}, which comes later")
        return self._trees[name]


def acts(op: Instruction) -> bool:
    """Does an instruction have effects, or may the computations that it runs have them?"""
    return op.opcode in _RUN or _has_effect(op)


def _has_effect(op: Instruction) -> bool:
    return op.opcode in _EFFECTS or op.has_side_effect


def accumulations(body: Computation, condition: Computation) -> dict[str, int]:
    """Additions of a loop to carries that nothing else reads or writes, with those carries."""
    reads = Counter(_elements(body))
    read_by_condition = set(_elements(condition))
    if body.root.opcode != "tuple" or WHOLE in reads or WHOLE in read_by_condition:
        return {}
    additions: dict[str, int] = {}
    for number, name in enumerate(body.root.operands):
        op = body.ops[name]
        if op.opcode != "add" or op.predecessors or len(body.uses[name]) != 1:
            continue
        if reads[number] != 1 or number in read_by_condition:
            continue
        elements = [name for name in op.operands if _is_element(body, name, number)]
        carries = [element for element in elements if len(body.uses[element]) == 1]
        if len(carries) == 1:
            additions[name] = number
    return additions


WHOLE = -1  # of a loop's parameter, rather than one of its elements


def _elements(body: Computation) -> Iterator[int]:
    """Numbers of the elements of its parameter that a computation reads, one for each read."""
    for user, _ in body.uses[body.parameters[0].name]:
        yield user.index if user.opcode == "get-tuple-element" else WHOLE


def _is_element(body: Computation, name: str, number: int) -> bool:
    op = body.ops[name]
    if op.opcode != "get-tuple-element":
        return False
    return op.operands[0] == body.parameters[0].name and op.index == number


def arrays_in(tree: ArrayTree) -> list[SpreadArray]:
    """The arrays of a tree, in order."""
    if isinstance(tree, SpreadArray):
        return [tree]
    return [array for element in tree for array in arrays_in(element)]


def shaped_as(shape: Shape, arrays: Iterator[SpreadArray]) -> ArrayTree:
    """Arrays as a tree of this shape."""
    if isinstance(shape, Array):
        return next(arrays)
    return tuple(shaped_as(part, arrays) for part in shape)
