"""Which fusions may be merged at all: those that go through one array element by element, and maybe sum it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.rewrites.fusion import CHEAP, LEAST_BYTES, buffer_of, has_tuple_readers, is_open, result_buffers
from memplan.xla.shapes import Array, shape_text

_INSIDE = CHEAP | {"reduce", "tuple"}
Space = tuple[tuple[int, ...], str]  # dimensions and layout


@dataclass(frozen=True)
class Mergeable:
    """A fusion that may be merged."""

    op: Instruction
    fused: Computation
    space: Space  # of the array whose elements it goes through
    sums: tuple[tuple[str, str, str], ...]  # of its reductions, what they are over, along what, and what they make
    columns: bool  # they sum up columns: neighbours in memory stay apart
    reads: Mapping[str, int]  # large buffers that it reads, and their bytes
    makes: tuple[str, ...]  # its results as buffers

    @property
    def arrays(self) -> int:
        return len(self.op.operands) + len(self.makes)


def mergeable(module: Module, body: Computation, op: Instruction) -> Mergeable | None:
    """The instruction, if it is such a fusion."""
    if not is_open(op) or op.root or has_tuple_readers(body, op):
        return None
    fused = module[op.called[0]]
    if len(fused.results) != len(op.result) or any(one.opcode not in _INSIDE for one in fused.ops.values()):
        return None
    spaces, sums, columns = set[Space](), list[tuple[str, str, str]](), False
    for result in fused.results:
        maker = fused.behind_bitcasts(result)
        if maker.opcode == "reduce":
            operand = fused.ops[maker.operands[0]]
            along = maker.attributes.partition("dimensions={")[2].partition("}")[0]
            sums.append((str(operand.shape), along, shape_text(maker.shape)))
            columns |= operand.result[0].minor not in map(int, along.split(","))
            maker = fused.behind_bitcasts(operand)
        elif maker.opcode == "parameter":
            return None
        if not isinstance(maker.shape, Array):
            return None
        spaces.add((maker.shape.dims, maker.shape.layout))
    reductions = sum(one.opcode == "reduce" for one in fused.ops.values())
    if len(spaces) != 1 or reductions != len(sums) or bool(sums) != (op.attribute("kind") == "kInput"):
        return None
    reads = {buffer_of(body, name): body.behind_bitcasts(body.ops[name]).nbytes for name in op.operands}
    large = {name: nbytes for name, nbytes in reads.items() if nbytes >= LEAST_BYTES}
    return Mergeable(op, fused, spaces.pop(), tuple(sums), columns, large, result_buffers(op))
