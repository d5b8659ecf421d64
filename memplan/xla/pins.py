"""A module's metadata -> the buffers that the user's pins are about.

No module contains the names of `jax.ad_checkpoint.checkpoint_name`. `program.pins` puts a mark into
the name scope of the equation that computes the value. XLA keeps the mark with the instruction,
whatever it fuses that into.
"""

from collections.abc import Sequence
from dataclasses import replace

from memplan.planning.problem import Pin, Problem
from memplan.program.pins import MARK
from memplan.xla.buffers import instruction_of, leaf_of
from memplan.xla.module import Instruction, Module

# These opcodes keep the value of their operand and change only its type or layout.
_SAME_VALUE = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
_BACKWARD = "transpose("  # jax's reverse pass puts this into the scope of what it adds.


def with_pins(problem: Problem, module: Module, pins: Sequence[Pin]) -> Problem:
    """The problem with the pins of those buffers that a kernel of the reverse pass reads.

    Args:
      pins: in the order of their marks.
    """
    backward = [_is_backward_kernel(module, kernel.name) for kernel in problem.kernels]
    read_backward = {
        buffer
        for kernel, is_backward in zip(problem.kernels, backward, strict=True)
        if is_backward
        for buffer in kernel.reads
    }
    buffers = list(problem.buffers)
    for number in read_backward:
        buffer = buffers[number]
        if buffer.maker is not None and not backward[buffer.maker]:
            pin = _pin_number(module, buffer.name)
            buffers[number] = buffer if pin is None else replace(buffer, pin=pins[pin])
    return replace(problem, buffers=tuple(buffers))


def _pin_number(module: Module, buffer: str) -> int | None:
    """The number of the pin of a buffer's value; None if it has no pin."""
    op = module.instructions[instruction_of(buffer)]
    leaf = leaf_of(buffer)
    fused = module[op.called[0]] if op.opcode == "fusion" else None
    results = (op,) if fused is None else fused.results
    if leaf >= len(results):  # A library's workspace, or one more result of a pooling.
        return None
    op = results[leaf]
    while fused is not None and not MARK.search(op.op_name) and op.opcode in _SAME_VALUE:
        op = fused.ops[op.operands[0]]
    mark = MARK.search(op.op_name)
    return int(mark[1]) if mark else None


def _is_backward_kernel(module: Module, name: str) -> bool:
    """Does a kernel belong to the reverse pass? The begin and the end of a computation do not."""
    op = module.instructions.get(name)
    if op is None:
        return False
    fused = module[op.called[0]].ops.values() if op.opcode == "fusion" else ()
    return any(map(_is_backward, (op, *fused)))


def _is_backward(op: Instruction) -> bool:
    return op.opcode == "transpose" or _BACKWARD in op.op_name
