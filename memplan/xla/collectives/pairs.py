"""Starts and ends of asynchronous collectives."""

import re
from collections.abc import Mapping
from dataclasses import replace

from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import Computation, Instruction

_NOTHING = frozenset({"parameter", "constant", "bitcast", "get-tuple-element"})
_IN_PLACE = re.compile(r",? ?output_to_operand_aliasing=\{.*?\}(?=, [a-z]|$)")


def synchronous_pairs(body: Computation) -> Mapping[str, str]:
    """Start -> end of every collective during which nothing runs.

    XLA:GPU makes one synchronous instruction of each after its scheduler (`ConvertAsyncCollectivesToSync`).
    """
    found: dict[str, str] = {}
    under_way: set[str] = set()
    for op in body.ops.values():
        if op.opcode.endswith("-start") and is_collective(op.opcode):
            under_way.add(op.name)
        elif op.opcode.endswith("-done") and is_collective(op.opcode.removesuffix("-done")):
            if op.operands[0] in under_way:
                under_way.remove(op.operands[0])
                found[op.operands[0]] = op.name
        elif op.opcode not in _NOTHING:
            under_way.clear()
    return found


def as_synchronous(start: Instruction, done: Instruction) -> Instruction:
    """A pair as one instruction, under the name of its start; its result may be in a buffer of its own."""
    opcode, attributes = start.opcode.removesuffix("-start"), _IN_PLACE.sub("", start.attributes)
    return replace(start, opcode=opcode, attributes=attributes, shape=done.shape)
