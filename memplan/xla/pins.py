"""A module's metadata -> the buffers that the user's pins are about.

A name of `jax.ad_checkpoint.checkpoint_name` is in no module. `program.pins` puts a mark into the name scope of the
equation that makes the value, and XLA keeps it with the instruction, wherever that is fused to.
"""

from collections.abc import Sequence
from dataclasses import replace

from memplan.planning.problem import Pin, Problem
from memplan.program.pins import MARK
from memplan.xla.buffers import instruction_of, leaf_of
from memplan.xla.module import Instruction, Module

_SAME_VALUE = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})  # in another type or layout
_BACKWARD = "transpose("  # in the scope of what jax's reverse pass adds


def with_pins(problem: Problem, module: Module, pins: Sequence[Pin]) -> Problem:
    """The problem with the pins of those buffers that a kernel of the reverse pass reads.

    Args:
      pins: in the order of their marks.
    """
    ops = (module.instructions.get(one.name) for one in problem.kernels)  # none for where a computation begins or ends
    backward = [op is not None and _is_backward(module, op) for op in ops]
    read_later = {read for number, one in enumerate(problem.kernels) if backward[number] for read in one.reads}
    buffers = list(problem.buffers)
    for number in read_later:
        one = buffers[number]
        if one.maker is not None and not backward[one.maker]:
            number_of_pin = _mark(module, one.name)
            buffers[number] = one if number_of_pin is None else replace(one, pin=pins[number_of_pin])
    return replace(problem, buffers=tuple(buffers))


def _mark(module: Module, buffer: str) -> int | None:
    """The number of the pin of a buffer's value."""
    op = module.instructions[instruction_of(buffer)]
    if op.opcode == "fusion":
        fused = module[op.called[0]]
        op = fused.results[leaf_of(buffer)]
        while not (found := MARK.search(op.line)) and op.opcode in _SAME_VALUE:
            op = fused.ops[op.operands[0]]
    else:
        found = MARK.search(op.line) if not leaf_of(buffer) else None  # what follows is a library's workspace
    return int(found[1]) if found else None


def _is_backward(module: Module, op: Instruction) -> bool:
    fused = module.texts[op.called[0]] if op.opcode == "fusion" else ""
    return _BACKWARD in op.line or _BACKWARD in fused
