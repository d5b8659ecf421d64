"""Instructions that only move elements among devices and within arrays, or add across devices."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.errors import UnsupportedProgramError
from memplan.verify.partition_numbers import PartitionNumbers, clamped
from memplan.verify.pieces import size_of
from memplan.verify.spreads import Spread, Spreads, Teams
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.shapes import Array

COLLECTIVES = frozenset({"all-reduce", "reduce-scatter", "all-gather", "all-to-all"})
SUMS = frozenset({"all-reduce", "reduce-scatter", "reduce", "add"})
# Only their first operand is data; the other operands say where or from what on.
_FIRST_ALONE = frozenset({"reduce", "pad", "dynamic-slice"})
_ADDABLE = frozenset(
    """
    f16 bf16 f32 f64 c64 c128 s1 s2 s4 s8 s16 s32 s64 u1 u2 u4 u8 u16 u32 u64
    """.split()  # noqa: SIM905
)

Spreading = Sequence[Spread | None] | None
"""Every leaf of a result as a spread array; None where the instruction moves no elements."""


def data(op: Instruction) -> tuple[str, ...]:
    """The operands whose elements an instruction moves or adds."""
    return op.operands[:1] if op.opcode in _FIRST_ALONE else op.operands


@dataclass
class Moves:
    """Instructions of a module as spread arrays; None for every other instruction."""

    module: Module
    spreads: Spreads
    _teams: dict[object, Teams | None] = field(default_factory=dict)

    def spread(
        self,
        op: Instruction,
        body: Computation,
        operands: Sequence[Spread],
        numbers: PartitionNumbers,
    ) -> Spreading:
        """The result of an instruction, of the spread arrays that are its data."""
        rule = _RULES.get(op.opcode)
        shapes = [body.ops[name].shape for name in data(op)]
        if rule is None or op.predecessors or not all(map(_is_plain, (*op.result, *shapes))):
            return None
        arrays = [shape for shape in shapes if isinstance(shape, Array)]
        move = _Move(op, body, arrays, numbers)
        if len({array.dtype for array in (*op.result, *arrays)}) > 1:
            return None
        results = rule(self, move, operands)
        if results is None:
            return None
        sizes = [None if spread is None else size_of(spread.rows[0]) for spread in results]
        return results if sizes == [array.size for array in op.result] else None

    def teams(self, op: Instruction) -> Teams | None:
        """The groups of partitions in which a collective acts.

        None where it does not act on all of them evenly, or where its groups are of replicas.
        """
        of_partitions = op.opcode == "all-to-all" or op.counts_devices
        if not of_partitions or op.channel is None:
            return None
        try:
            groups = op.groups(self.spreads.devices)
        except UnsupportedProgramError:
            return None
        if groups not in self._teams:
            members = sorted(itertools.chain(*groups))
            sizes = {len(group) for group in groups}
            even = members == list(range(self.spreads.devices)) and len(sizes) == 1
            self._teams[groups] = Teams(groups) if even else None
        return self._teams[groups]

    def adds(self, name: str, dtype: str) -> bool:
        """Does a computation add two scalars of a type?"""
        body = self.module[name]
        parameters = [op.name for op in body.ops.values() if op.opcode == "parameter"]
        scalars = all(op.shape == Array(dtype, ()) for op in body.ops.values())
        is_binary = len(body.ops) == 3 and sorted(body.root.operands) == sorted(parameters)
        return is_binary and scalars and body.root.opcode == "add" and dtype in _ADDABLE


@dataclass(frozen=True)
class _Move:
    """An instruction, with the shapes of its data."""

    op: Instruction
    body: Computation
    arrays: Sequence[Array]
    numbers: PartitionNumbers

    @property
    def result(self) -> Array:
        return self.op.result[0]


_Rule = Callable[[Moves, _Move, Sequence[Spread]], Spreading]


def _is_plain(shape: object) -> bool:
    return isinstance(shape, Array) and shape.size > 0 and not shape.layout.space


def around(dims: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Elements outside of a dimension, in it, and inside of it."""
    return math.prod(dims[:dim]), dims[dim], math.prod(dims[dim + 1 :])


def _adds_all(moves: Moves, move: _Move) -> bool:
    return all(moves.adds(move.op.to_apply, array.dtype) for array in move.arrays)


def _all_reduce(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    teams = moves.teams(move.op)
    if teams is None or not _adds_all(moves, move):
        return None
    return [moves.spreads.summed(spread, teams) for spread in operands]


def _reduce_scatter(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    teams = moves.teams(move.op)
    (dim,) = move.op.dimensions
    if teams is None or not _adds_all(moves, move):
        return None
    return [
        moves.spreads.scattered(spread, teams, around(array.dims, dim))
        for spread, array in zip(operands, move.arrays, strict=True)
    ]


def _all_gather(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    teams = moves.teams(move.op)
    (dim,) = move.op.dimensions
    if teams is None:
        return None
    return [
        moves.spreads.gathered(spread, teams, math.prod(array.dims[:dim]))
        for spread, array in zip(operands, move.arrays, strict=True)
    ]


def _all_to_all(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    teams = moves.teams(move.op)
    if teams is None:
        return None
    spreads = moves.spreads
    if not isinstance(move.op.shape, Array):
        same = len(operands) == teams.size and len({array.dims for array in move.arrays}) == 1
        return spreads.exchanged(operands, teams) if same else None
    (dim,) = move.op.dimensions[:1] or (0,)
    outer, size, inner = around(move.arrays[0].dims, dim)
    if outer != 1 or size % teams.size:
        return None
    sizes = (1, size, inner)
    width = size // teams.size
    sent = [spreads.narrowed(operands[0], sizes, low, low + width) for low in range(0, size, width)]
    received = [None] if None in sent else spreads.exchanged(_every(sent), teams)
    return [None if None in received else spreads.joined(_every(received))]


def _every(spreads: Sequence[Spread | None]) -> list[Spread]:
    return [spread for spread in spreads if spread is not None]


def _reshape(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    return operands


def _transpose(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    return [moves.spreads.turned(operands[0], move.arrays[0].dims, move.op.dimensions)]


def _concatenate(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    dim = move.op.dimensions[0]
    outer = max(math.prod(array.dims[:dim]) for array in move.arrays)
    return [moves.spreads.joined(operands) if outer == 1 else None]


def _pad(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    """Zeros before and after the elements, along the first dimension alone."""
    if not _is_zero(move, move.op.operands[1]) or not move.op.padding:
        return None
    (low, high, interior), *inner_sides = move.op.padding
    if interior or low < 0 or high < 0 or any(map(any, inner_sides)):
        return None
    inner = math.prod(move.arrays[0].dims[1:])
    before = [moves.spreads.zeros(low * inner)] if low else []
    after = [moves.spreads.zeros(high * inner)] if high else []
    return [moves.spreads.joined([*before, operands[0], *after])]


def _slice(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    spread = operands[0]
    dims = list(move.arrays[0].dims)
    if len(move.op.slices) != len(dims):
        return None
    for (low, high, stride), size in zip(move.op.slices, dims, strict=True):
        if stride != 1 or not low < high <= size:
            return None
    for dim, (low, high, _) in enumerate(move.op.slices):
        if (low, high) != (0, dims[dim]):
            narrowed = moves.spreads.narrowed(spread, around(dims, dim), low, high)
            if narrowed is None:
                return None
            spread = narrowed
            dims[dim] = high - low
    return [spread]


def _dynamic_slice(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    """A slice whose start follows from the number of the partition."""
    if move.numbers[move.op.name] is not None:
        return None
    spread = operands[0]
    dims = list(move.arrays[0].dims)
    for dim, (size, name) in enumerate(zip(move.result.dims, move.op.operands[1:], strict=True)):
        if size != dims[dim]:
            if (numbers := move.numbers[name]) is None:
                return None
            starts = [clamped(number, dims[dim], size) for number in numbers]
            narrowed = moves.spreads.at_starts(spread, around(dims, dim), starts, size)
            if narrowed is None:
                return None
            spread = narrowed
            dims[dim] = size
    return [spread]


def _add(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    if move.result.dtype not in _ADDABLE or all(map(moves.spreads.is_own, operands)):
        return None
    return [moves.spreads.added(operands)]


def _reduce(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    """A sum over the first dimension."""
    array, op, spreads = move.arrays[0], move.op, moves.spreads
    if not array.dims or op.dimensions != (0,) or not moves.adds(op.to_apply, array.dtype):
        return None
    sizes = around(array.dims, 0)
    is_small = 0 < sizes[1] <= spreads.devices
    if not is_small or not _is_zero(move, op.operands[1]) or spreads.is_own(operands[0]):
        return None
    terms = [spreads.narrowed(operands[0], sizes, row, row + 1) for row in range(sizes[1])]
    return [None if None in terms else spreads.added(_every(terms))]


def _constant(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    return [moves.spreads.zeros(move.result.size)] if move.op.is_positive_zero else None


def _broadcast(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
    is_zero = moves.spreads.is_zero(operands[0])
    return [moves.spreads.zeros(move.result.size)] if is_zero else None


def _is_zero(move: _Move, name: str) -> bool:
    return move.body.ops[name].is_positive_zero


def _row_major(rule: _Rule) -> _Rule:
    """A rule for arrays whose elements lie in memory in row-major order."""

    @functools.wraps(rule)
    def checked(moves: Moves, move: _Move, operands: Sequence[Spread]) -> Spreading:
        is_row_major = all(array.is_row_major for array in (*move.op.result, *move.arrays))
        return rule(moves, move, operands) if is_row_major else None

    return checked


_RULES: Mapping[str, _Rule] = {
    "all-reduce": _all_reduce,
    "add": _add,
    "constant": _constant,
    "broadcast": _broadcast,
    "reduce-scatter": _row_major(_reduce_scatter),
    "all-gather": _row_major(_all_gather),
    "all-to-all": _row_major(_all_to_all),
    "reshape": _row_major(_reshape),
    "bitcast": _row_major(_reshape),
    "transpose": _row_major(_transpose),
    "concatenate": _row_major(_concatenate),
    "pad": _row_major(_pad),
    "slice": _row_major(_slice),
    "dynamic-slice": _row_major(_dynamic_slice),
    "reduce": _row_major(_reduce),
}
