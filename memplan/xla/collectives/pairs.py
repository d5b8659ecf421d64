"""Starts and ends of asynchronous collectives."""

from collections.abc import Mapping

from memplan.xla.collectives.cost import is_collective
from memplan.xla.module import Computation, Instruction

# These instructions run no kernel, so a collective around them alone hides nothing.
_NO_KERNEL = frozenset({"parameter", "constant", "bitcast", "get-tuple-element"})


def synchronous_pairs(body: Computation) -> Mapping[str, str]:
    """Start -> end of every collective during which nothing runs.

    After its scheduler, XLA:GPU makes each of these pairs one synchronous instruction
    (`ConvertAsyncCollectivesToSync`).
    """
    pairs: dict[str, str] = {}
    in_flight: set[str] = set()
    for op in body.ops.values():
        if op.opcode.endswith("-start") and is_collective(op.opcode):
            in_flight.add(op.name)
        elif op.opcode.endswith("-done") and is_collective(op.opcode.removesuffix("-done")):
            (start,) = op.operands
            if start in in_flight:
                in_flight.remove(start)
                pairs[start] = op.name
        elif op.opcode not in _NO_KERNEL:
            in_flight.clear()
    return pairs


def as_synchronous(start: Instruction, done: Instruction) -> Instruction:
    """A pair as one instruction, under the name of its start, with a result buffer of its own."""
    opcode = start.opcode.removesuffix("-start")
    return start.changed(opcode=opcode, shape=done.shape, in_place=False)
