"""Gathers that XLA's partitioner adds where it cannot divide an operation of the user along a divided dimension."""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from memplan.xla.collectives.cost import EXCHANGE, GATHER
from memplan.xla.module import Computation, Instruction, Module, with_blocks
from memplan.xla.shapes import Array
from memplan.xla.sources import finder

_ADDED = 'is_spmd_generated="true"'  # by the partitioner: a collective of a `shard_map` has no such attribute
_PRIMITIVE = re.compile(r'\bop_name="(?:[^"\\]|\\.)*?(\w+)"')
_GROUPED = re.compile(r"\b(?:feature|batch)_group_count=")
_MOVES = frozenset({GATHER, "bitcast", "convert", "copy", "reshape", "transpose"})
_SLICING = frozenset({"constant", "dynamic-slice", "parameter"})
_Around = dict[str, tuple[Computation, Instruction]]  # computation of a loop -> where that loop is


@dataclass(frozen=True)
class Gather:
    """What one operation of the user reads from all devices.

    Attributes:
      reader: the operation, as jax names it.
      source: its `file:line`, or ''.
      array: what is gathered; None for an exchange, after which each device has as much as before.
      nbytes, piece_nbytes: on each device, gathered and before.
    """

    reader: str
    source: str
    array: Array | None
    nbytes: int
    piece_nbytes: int


def unexpected_gathers(module: Module, asked: Collection[int]) -> tuple[Gather, ...]:
    """Those of a partitioned module, one for each line of the user, the largest first.

    The gathers of FSDP and ZeRO are expected: what they gather is an argument that the step returns anew, or no
    operation reads it that XLA could not divide. So are those that a constraint asks for.

    Args:
      asked: elements on one device of arrays that the program says how to divide.
    """
    read = list(_whole_reads(module, asked))
    source_of = finder(module) if read else lambda op: ""
    found: dict[tuple[str, str], Gather] = {}
    for reader, body, op in read:
        array = op.result[0] if op.opcode == GATHER else None
        piece_nbytes = sum(body.ops[name].nbytes for name in op.operands)
        gather = Gather(_primitive(reader), source_of(reader), array, op.nbytes, piece_nbytes)
        place = gather.reader, gather.source
        found[place] = max(found.get(place, gather), gather, key=lambda one: one.nbytes)
    return tuple(sorted(found.values(), key=lambda one: -one.nbytes))


def _whole_reads(module: Module, asked: Collection[int]) -> Iterator[tuple[Instruction, Computation, Instruction]]:
    """Operations that XLA does not divide, each with the collective that it reads and where that is."""
    around: _Around = {}
    state = {(array.dtype, array.dims) for array in module.entry.root.result}
    for body in with_blocks(module, module.entry):
        around |= {name: (body, op) for op in body.ops.values() if op.opcode == "while" for name in op.called}
        for op in (one for one in body.ops.values() if one.opcode in (GATHER, EXCHANGE) and _ADDED in one.line):
            if op.opcode == EXCHANGE:
                if _primitive(op) == "sort":
                    yield op, body, op
            elif op.result[0].size not in asked and _origin(module, around, body, op) not in state:
                for reader, position, array in _readers(module, body, op):
                    if _stays_whole(reader, position, array, op):
                        yield reader, body, op


def _primitive(op: Instruction) -> str:
    named = _PRIMITIVE.search(op.line)
    return named[1] if named else ""


def _stays_whole(reader: Instruction, position: int, array: Array, gather: Instruction) -> bool:
    """Is it an operation that XLA does not divide along the gathered dimension?"""
    if reader.opcode == "convolution":
        return position == 0 and _GROUPED.search(reader.attributes) is not None
    if reader.opcode == "dynamic-slice" and _primitive(reader) == "dynamic_slice":
        before = math.prod(gather.result[0].dims[: int(gather.attribute("dimensions").strip("{}"))])
        dim = next((n for n in range(len(array.dims)) if math.prod(array.dims[:n]) == before), None)
        return position == 0 and dim is not None and reader.result[0].dims[dim] < array.dims[dim]
    return _primitive(reader) in ("sort", "top_k") and _primitive(gather) != _primitive(reader)  # not of parts of it


def _readers(module: Module, body: Computation, op: Instruction) -> Iterator[tuple[Instruction, int, Array]]:
    """What reads it, behind moves, in fusions and in loops; at which position; and the operand."""
    for reader, position in body.uses[op.name]:
        if reader.opcode in _MOVES or _only_moves(module, reader):
            yield from _readers(module, body, reader)
        elif reader.opcode in ("call", "fusion"):
            inside = module[reader.called[0]]
            yield from _readers(module, inside, inside.parameters[position])
        elif reader.opcode == "tuple":
            loops = (loop for loop, _ in body.uses[reader.name] if loop.opcode == "while")
            for inside in (module[name] for loop in loops for name in loop.called):
                for element, _ in inside.uses[inside.parameters[0].name]:
                    if element.opcode == "get-tuple-element" and element.index == position:
                        yield from _readers(module, inside, element)
        else:
            yield reader, position, op.result[0]


def _only_moves(module: Module, op: Instruction, others: Collection[str] = ("parameter",)) -> bool:
    if op.opcode != "fusion":
        return False
    return all(one.opcode in _MOVES or one.opcode in others for one in module[op.called[0]].ops.values())


def _origin(module: Module, around: _Around, body: Computation, op: Instruction) -> tuple[str, tuple[int, ...]] | None:
    """Type and dimensions of the argument that it moves or slices; None if it is computed."""
    while op.opcode != "parameter":
        if op.operands and (op.opcode in _MOVES or op.opcode == "dynamic-slice" or _only_moves(module, op, _SLICING)):
            op = max((body.ops[name] for name in op.operands), key=lambda one: one.nbytes)
        elif (
            op.opcode == "get-tuple-element" and body.name in around and body.ops[op.operands[0]].opcode == "parameter"
        ):
            index = op.index
            body, loop = around[body.name]
            given = body.ops[loop.operands[0]]
            if given.opcode != "tuple":
                return None
            op = body.ops[given.operands[index]]
        else:
            return None
    return op.result[0].dtype, op.result[0].dims
