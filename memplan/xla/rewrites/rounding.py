"""When does a value keep its last bits in another fusion of a GPU?

Within a fusion XLA:GPU rounds every product, sum and conversion as it does between two: its PTX says `mul.rn` and
`add.rn`, which are never contracted, and rounds to float16 and back. One pair is made one: an integer that becomes a
float and then a narrower one (MLIR's `TruncFSIToFPToSIToFP`). A sum over many elements adds them in an order that
follows from what it is over, from the narrowest array of its fusion, and from whether something in there keeps it from
reading several elements at once (`ReductionFusion`, `MayPreventVectorization`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from memplan.xla.module import Computation, Instruction
from memplan.xla.shapes import Array

_ONE_BY_ONE = frozenset({"sine", "cosine", "tan", "power", "atan2"})
_INTEGER = re.compile(r"[su]\d+")


def keeps_bits(fused: Computation, result: Instruction) -> bool:
    """Does a value of a fusion have the same bits where it is read within and where it is written and read again?"""
    made = fused.behind_bitcasts(result)
    if made.opcode != "convert":
        return True
    (given,) = (fused.ops[name].shape for name in made.operands)
    return not (isinstance(given, Array) and _INTEGER.fullmatch(given.dtype))


def narrowest_bits(op: Instruction, operands: Iterable[Instruction]) -> tuple[int, int]:
    """Bits of an element of the narrowest array that a fusion reads, and that it makes."""
    read = (array.bits for one in operands for array in one.result)
    return min(read, default=0), min(array.bits for array in op.result)


def prevents_vectorization(fused: Computation) -> bool:
    """Does it keep sums beside it from reading several elements at once?"""
    return not _ONE_BY_ONE.isdisjoint(op.opcode for op in fused.ops.values())
