"""Instructions that only move elements among devices and within arrays, or add those of several devices."""

import functools
import itertools
import math
import re
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
_FIRST_ALONE = frozenset({"reduce", "pad", "dynamic-slice"})  # the others say how, not what
_ADDABLE = re.compile(r"(?:bf|f|s|u|c)\d+$")
_DIMS = re.compile(r"\bdimensions=\{([\d,]*)\}")
_RANGES = re.compile(r"\bslice=\{([^}]*)\}")
_PADDING = re.compile(r"\bpadding=([\d_x\-]+)")
_ZERO = re.compile(r"^[{}\s,]*0[{}\s,0]*$")

Made = Sequence[Spread | None] | None  # of every leaf of the result


def data(op: Instruction) -> tuple[str, ...]:
    """The operands whose elements an instruction moves or adds."""
    return op.operands[:1] if op.opcode in _FIRST_ALONE else op.operands


@dataclass
class Moves:
    """Instructions of a module as spread arrays; None for every other instruction."""

    module: Module
    spreads: Spreads
    _teams: dict[object, Teams | None] = field(default_factory=dict)

    def made(self, op: Instruction, body: Computation, given: Sequence[Spread], known: PartitionNumbers) -> Made:
        """What an instruction makes of its data."""
        make = _MAKERS.get(op.opcode)
        arrays = [body.ops[name].shape for name in data(op)]
        if make is None or "control-predecessors" in op.attributes or not all(map(_is_plain, (*op.result, *arrays))):
            return None
        call = _Call(op, body, [one for one in arrays if isinstance(one, Array)], known)
        if len({array.dtype for array in (*op.result, *call.given)}) > 1:
            return None
        made = make(self, call, given)
        sizes = [None if one is None else size_of(one.rows[0]) for one in made or ()]
        return made if sizes == [array.size for array in op.result] else None

    def teams(self, op: Instruction) -> Teams | None:
        """The groups of partitions in which a collective acts; None where it does not act on all of them evenly."""
        key = op.opcode == "all-to-all" or "use_global_device_ids=true" in op.attributes
        if not key or "channel_id=" not in op.attributes:
            return None  # the numbers in the groups are those of replicas
        try:
            groups = op.groups(self.spreads.devices)
        except UnsupportedProgramError:
            return None
        if groups not in self._teams:
            members = sorted(itertools.chain(*groups))
            even = members == list(range(self.spreads.devices)) and len(set(map(len, groups))) == 1
            self._teams[groups] = Teams(groups) if even else None
        return self._teams[groups]

    def adds(self, name: str, dtype: str) -> bool:
        """Does a computation add two scalars of a type?"""
        body = self.module[name.lstrip("%")]
        given = [op.name for op in body.ops.values() if op.opcode == "parameter"]
        same = all(op.shape == Array(dtype, ()) for op in body.ops.values())
        two = len(body.ops) == 3 and sorted(body.root.operands) == sorted(given)
        return two and same and body.root.opcode == "add" and bool(_ADDABLE.match(dtype))


@dataclass(frozen=True)
class _Call:
    """An instruction, with the shapes of its data."""

    op: Instruction
    body: Computation
    given: Sequence[Array]
    known: PartitionNumbers

    @property
    def result(self) -> Array:
        return self.op.result[0]

    def dims(self) -> list[int]:
        found = _DIMS.search(self.op.attributes)
        return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _is_plain(shape: object) -> bool:
    return isinstance(shape, Array) and shape.size > 0 and "S(" not in shape.layout


def is_row_major(shape: Array) -> bool:
    """Does it lie in memory in the order of its elements, as far as its layout says?"""
    order = re.match(r"\{([\d,]+)\}$", shape.layout)
    return shape.layout in ("", "{}") or bool(order and order[1] == ",".join(map(str, range(len(shape.dims))[::-1])))


def around(dims: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Elements outside of a dimension, in it, and inside of it."""
    return math.prod(dims[:dim]), dims[dim], math.prod(dims[dim + 1 :])


def _all_reduce(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    teams = moves.teams(call.op)
    if teams is None or not all(moves.adds(call.op.attribute("to_apply"), one.dtype) for one in call.given):
        return None
    return [moves.spreads.summed(one, teams) for one in given]


def _reduce_scatter(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    teams, (dim,) = moves.teams(call.op), call.dims()
    if teams is None or not all(moves.adds(call.op.attribute("to_apply"), one.dtype) for one in call.given):
        return None
    pairs = zip(given, call.given, strict=True)
    return [moves.spreads.scattered(one, teams, around(array.dims, dim)) for one, array in pairs]


def _all_gather(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    teams, (dim,) = moves.teams(call.op), call.dims()
    if teams is None:
        return None
    pairs = zip(given, call.given, strict=True)
    return [moves.spreads.gathered(one, teams, math.prod(array.dims[:dim])) for one, array in pairs]


def _all_to_all(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    teams = moves.teams(call.op)
    if teams is None:
        return None
    if not isinstance(call.op.shape, Array):
        same = len(given) == teams.size and len({array.dims for array in call.given}) == 1
        return moves.spreads.exchanged(given, teams) if same else None
    outer, size, inner = around(call.given[0].dims, (call.dims() or [0])[0])
    if outer != 1 or size % teams.size:
        return None
    part = size // teams.size
    sent = [moves.spreads.narrowed(given[0], (1, size, inner), at, at + part) for at in range(0, size, part)]
    received = moves.spreads.exchanged(_every(sent), teams) if None not in sent else [None]
    return [moves.spreads.joined(_every(received)) if None not in received else None]


def _every(found: Sequence[Spread | None]) -> list[Spread]:
    return [one for one in found if one is not None]


def _reshape(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    return given


def _transpose(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    return [moves.spreads.turned(given[0], call.given[0].dims, call.dims())]


def _concatenate(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    outer = max(math.prod(array.dims[: call.dims()[0]]) for array in call.given)
    return [moves.spreads.joined(given) if outer == 1 else None]


def _pad(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    found, dims = _PADDING.search(call.op.attributes), call.given[0].dims
    sides = [[int(one) for one in side.split("_")] for side in found[1].split("x")] if found else []
    zero = _is_zero(call.body, call.op.operands[1])
    if not zero or not sides or any(map(any, sides[1:])) or len(sides[0]) > 2 or min(sides[0]) < 0:
        return None
    inner = math.prod(dims[1:])
    before, after = ([moves.spreads.zeros(side * inner)] if side else [] for side in sides[0])
    return [moves.spreads.joined([*before, given[0], *after])]


def _slice(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    found = _RANGES.search(call.op.attributes)
    ranges = [[int(end) for end in one.split(":")] for one in re.findall(r"\[([\d:]+)\]", found[1])] if found else []
    spread, dims = given[0], list(call.given[0].dims)
    if len(ranges) != len(dims) or any(len(one) != 2 for one in ranges):
        return None
    if not all(low < high <= size for (low, high), size in zip(ranges, dims, strict=True)):
        return None
    for dim, (low, high) in enumerate(ranges):
        if (low, high) != (0, dims[dim]):
            if (narrowed := moves.spreads.narrowed(spread, around(dims, dim), low, high)) is None:
                return None
            spread, dims[dim] = narrowed, high - low
    return [spread]


def _dynamic_slice(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    """A slice that starts where the number of the partition says."""
    if call.known[call.op.name] is not None:
        return None
    spread, dims = given[0], list(call.given[0].dims)
    for dim, (size, name) in enumerate(zip(call.result.dims, call.op.operands[1:], strict=True)):
        if size != dims[dim]:
            if (numbers := call.known[name]) is None:
                return None
            starts = [clamped(number, dims[dim], size) for number in numbers]
            if (narrowed := moves.spreads.at_starts(spread, around(dims, dim), starts, size)) is None:
                return None
            spread, dims[dim] = narrowed, size
    return [spread]


def _add(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    addable = bool(_ADDABLE.match(call.result.dtype)) and not all(map(moves.spreads.is_own, given))
    return [moves.spreads.added(given)] if addable else None


def _reduce(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    """A sum over the first dimension."""
    array, op = call.given[0], call.op
    adds = bool(array.dims) and call.dims() == [0] and moves.adds(op.attribute("to_apply"), array.dtype)
    sizes = around(array.dims, 0) if adds else (1, 0, 1)
    few = 0 < sizes[1] <= moves.spreads.devices
    if not few or not _is_zero(call.body, op.operands[1]) or moves.spreads.is_own(given[0]):
        return None
    parts = [moves.spreads.narrowed(given[0], sizes, at, at + 1) for at in range(sizes[1])]
    return [moves.spreads.added(_every(parts)) if None not in parts else None]


def _constant(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    return [moves.spreads.zeros(call.result.size)] if _is_zero(call.body, call.op.name) else None


def _broadcast(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
    return [moves.spreads.zeros(call.result.size)] if moves.spreads.is_zero(given[0]) else None


def _is_zero(body: Computation, name: str) -> bool:
    op = body.ops[name]
    return op.opcode == "constant" and bool(_ZERO.match(op.attributes))


def _rows(make: Callable[[Moves, _Call, Sequence[Spread]], Made]) -> Callable[[Moves, _Call, Sequence[Spread]], Made]:
    """For arrays of one type that lie in memory as their elements follow each other."""

    @functools.wraps(make)
    def checked(moves: Moves, call: _Call, given: Sequence[Spread]) -> Made:
        arrays = (*call.op.result, *call.given)
        return make(moves, call, given) if all(map(is_row_major, arrays)) else None

    return checked


_MAKERS: Mapping[str, Callable[[Moves, _Call, Sequence[Spread]], Made]] = {
    "all-reduce": _all_reduce,
    "add": _add,
    "constant": _constant,
    "broadcast": _broadcast,
    **{
        opcode: _rows(make)
        for opcode, make in {
            "reduce-scatter": _reduce_scatter,
            "all-gather": _all_gather,
            "all-to-all": _all_to_all,
            "reshape": _reshape,
            "bitcast": _reshape,
            "transpose": _transpose,
            "concatenate": _concatenate,
            "pad": _pad,
            "slice": _slice,
            "dynamic-slice": _dynamic_slice,
            "reduce": _reduce,
        }.items()
    },
}
