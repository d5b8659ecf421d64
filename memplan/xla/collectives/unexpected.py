"""Gathers that XLA's partitioner adds where it cannot partition an operation of the user."""

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from memplan.xla.collectives.cost import EXCHANGE, GATHER
from memplan.xla.module import Computation, Instruction, Module, with_blocks
from memplan.xla.shapes import Array
from memplan.xla.sources import finder

# These instructions move or convert elements of a single operand.
_MOVES = frozenset({GATHER, "bitcast", "convert", "copy", "reshape", "transpose"})
# A fusion that slices an argument consists of moves and these.
_SLICING = frozenset({"constant", "dynamic-slice", "parameter"})
_Around = dict[str, tuple[Computation, Instruction]]  # computation of a loop -> where that loop is


@dataclass(frozen=True)
class Gather:
    """What one operation of the user reads from all devices."""

    reader: str  # the operation, as jax names it
    source: str  # its `file:line`, or ''
    # what is gathered; None for an exchange, after which each device has as much as before
    array: Array | None
    nbytes: int  # on each device, gathered
    piece_nbytes: int  # on each device, before


def unexpected_gathers(module: Module, constrained_sizes: Collection[int]) -> tuple[Gather, ...]:
    """The unexpected gathers of a partitioned module, one for each source line, largest first.

    The gathers of FSDP and ZeRO are expected: they gather an argument that the step returns anew,
    or no operation reads the array that XLA could not partition. So are those that a sharding
    constraint asks for.

    Args:
      constrained_sizes: elements on one device of arrays whose sharding the program states.
    """
    reads = list(_whole_reads(module, constrained_sizes))
    source_of = finder(module) if reads else lambda op: ""
    gathers: dict[tuple[str, str], Gather] = {}  # by primitive and source line
    for reader, body, op in reads:
        array = op.result[0] if op.opcode == GATHER else None
        piece_nbytes = sum(body.ops[name].nbytes for name in op.operands)
        gather = Gather(_primitive(reader), source_of(reader), array, op.nbytes, piece_nbytes)
        key = gather.reader, gather.source
        if key not in gathers or gather.nbytes > gathers[key].nbytes:
            gathers[key] = gather
    return tuple(sorted(gathers.values(), key=lambda gather: -gather.nbytes))


def _whole_reads(
    module: Module,
    constrained_sizes: Collection[int],
) -> Iterator[tuple[Instruction, Computation, Instruction]]:
    """(operation that XLA does not partition, body, collective that it reads and that is there)."""
    around: _Around = {}
    state = {(array.dtype, array.dims) for array in module.entry.root.result}
    for body in with_blocks(module, module.entry):
        loops = (op for op in body.ops.values() if op.opcode == "while")
        around |= {name: (body, loop) for loop in loops for name in loop.called}
        for op in body.ops.values():
            if not _is_added(op):
                continue
            if op.opcode == EXCHANGE:
                if _primitive(op) == "sort":
                    yield op, body, op
                continue
            if op.result[0].size in constrained_sizes or _origin(module, around, body, op) in state:
                continue
            for reader, position, array in _readers(module, body, op):
                if _stays_whole(reader, position, array, op):
                    yield reader, body, op


def _is_added(op: Instruction) -> bool:
    """Is it a gather or exchange that the partitioner added? `shard_map` does not mark its own."""
    if op.opcode not in (GATHER, EXCHANGE):
        return False
    return op.frontend_attributes.get("is_spmd_generated") == "true"


def _primitive(op: Instruction) -> str:
    """The last word of jax's name of an operation."""
    backward = reversed(op.op_name)
    letters = itertools.takewhile(lambda letter: letter.isalnum() or letter == "_", backward)
    return "".join(letters)[::-1]


def _stays_whole(reader: Instruction, position: int, array: Array, gather: Instruction) -> bool:
    """Is it an operation that XLA does not partition along the gathered dimension?"""
    if reader.opcode == "convolution":
        is_grouped = reader.feature_groups > 1 or reader.batch_groups > 1
        return position == 0 and is_grouped
    if reader.opcode == "dynamic-slice" and _primitive(reader) == "dynamic_slice":
        before = math.prod(gather.result[0].dims[: gather.dimensions[0]])
        dims = range(len(array.dims))
        dim = next((dim for dim in dims if math.prod(array.dims[:dim]) == before), None)
        if position != 0 or dim is None:
            return False
        return reader.result[0].dims[dim] < array.dims[dim]
    # An operation reads gathers of parts of itself, too.
    is_other = _primitive(gather) != _primitive(reader)
    return is_other and _primitive(reader) in ("sort", "top_k")


def _readers(
    module: Module,
    body: Computation,
    op: Instruction,
) -> Iterator[tuple[Instruction, int, Array]]:
    """(reader, position, operand) of an instruction, behind moves, in fusions and in loops."""
    for reader, position in body.uses[op.name]:
        if reader.opcode in _MOVES or _only_moves(module, reader):
            yield from _readers(module, body, reader)
        elif reader.opcode in ("call", "fusion"):
            callee = module[reader.called[0]]
            yield from _readers(module, callee, callee.parameters[position])
        elif reader.opcode == "tuple":
            loops = (loop for loop, _ in body.uses[reader.name] if loop.opcode == "while")
            for callee in (module[name] for loop in loops for name in loop.called):
                for element, _ in callee.uses[callee.parameters[0].name]:
                    if element.opcode == "get-tuple-element" and element.index == position:
                        yield from _readers(module, callee, element)
        else:
            yield reader, position, op.result[0]


def _only_moves(
    module: Module,
    op: Instruction,
    allowed: Collection[str] = ("parameter",),
) -> bool:
    """Is it a fusion of moves and instructions with the allowed opcodes?"""
    if op.opcode != "fusion":
        return False
    inner_ops = module[op.called[0]].ops.values()
    return all(inner.opcode in _MOVES or inner.opcode in allowed for inner in inner_ops)


def _origin(
    module: Module,
    around: _Around,
    body: Computation,
    op: Instruction,
) -> tuple[str, tuple[int, ...]] | None:
    """Type and dimensions of the argument that it moves or slices; None if it is computed."""
    while op.opcode != "parameter":
        slices = op.opcode == "dynamic-slice" or _only_moves(module, op, _SLICING)
        if op.operands and (op.opcode in _MOVES or slices):
            op = max((body.ops[name] for name in op.operands), key=lambda operand: operand.nbytes)
        elif op.opcode == "get-tuple-element" and _is_state(around, body, op):
            index = op.index
            body, loop = around[body.name]
            initial = body.ops[loop.operands[0]]
            if initial.opcode != "tuple":
                return None
            op = body.ops[initial.operands[index]]
        else:
            return None
    return op.result[0].dtype, op.result[0].dims


def _is_state(around: _Around, body: Computation, element: Instruction) -> bool:
    """Is it an element of the state of the loop whose body or condition this is?"""
    return body.name in around and body.ops[element.operands[0]].opcode == "parameter"
