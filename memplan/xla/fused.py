"""Fusions and the computations that they call, written anew."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memplan.xla.module import Array, Computation, Instruction, Shape, read_instruction, spelled
from memplan.xla.sharing import ELEMENTWISE

CHEAP = ELEMENTWISE | {"broadcast", "bitcast", "constant", "iota", "parameter"}
"""What costs next to nothing beside the bytes that a fusion moves, and may be done twice."""
LEAST_BYTES = 1 << 20  # of a value: a fast GPU reads as much in a fifth of the time that a launch takes


def is_open(op: Instruction) -> bool:
    """A fusion whose emitter takes whatever is in it."""
    return op.opcode == "fusion" and op.attribute("kind") in ("kLoop", "kInput")


def source(body: Computation, name: str) -> str:
    """The buffer behind bitcasts, as a problem names it."""
    op = body.behind_bitcasts(body.ops[name])
    return f"{op.operands[0]}{{{op.index}}}" if op.opcode == "get-tuple-element" else op.name


def renamed(op: Instruction, now: dict[str, str]) -> str:
    """Its line, where operands have other names now."""
    operands = [now.get(name, name) for name in op.operands]
    return op.line if operands == list(op.operands) else op.written(op.name, operands)


def returning(ops: Sequence[Instruction], results: Sequence[Instruction], name: str) -> list[Instruction]:
    """Instructions that end in a root: the result, or a tuple of that name of several."""
    if len(results) == 1:
        (result,) = results
        root = result if result.root else read_instruction(result.line.replace("  %", "  ROOT %", 1))
        return [op for op in ops if op.name != result.name] + [root]
    shape, given = tuple(result.shape for result in results), ", ".join(f"%{result.name}" for result in results)
    return [*ops, read_instruction(f"  ROOT %{name} = {spelled(shape)} tuple({given})")]


def calling(op: Instruction, name: str, shape: Shape, operands: Sequence[str], fused: str) -> str:
    """The line of a fusion with another computation."""
    left, _, right = op.written(name, operands).partition(" = ")
    _, opened, rest = right.partition(" fusion(")
    rest = re.sub(rf"calls=%{re.escape(op.called[0])}(?![\w.\-])", f"calls=%{fused}", rest)
    return f"{left} = {spelled(shape)}{opened}{rest}"


def fused_text(name: str, parameters: Sequence[tuple[str, Shape]], ops: Sequence[Instruction]) -> str:
    """Text of a fused computation.

    Args:
      ops: its instructions but for the parameters; one is the root.
    """
    given = ", ".join(f"{one}: {_bare(shape)}" for one, shape in parameters)
    root = next(op for op in ops if op.root)
    lines = [f"  %{one} = {spelled(shape)} parameter({n})" for n, (one, shape) in enumerate(parameters)]
    return "\n".join([f"%{name} ({given}) -> {_bare(root.shape)} {{", *lines, *(op.line for op in ops), "}"])


def _bare(shape: Shape) -> str:
    """Without layouts, as a computation's first line has it."""
    return str(Array(shape.dtype, shape.dims)) if isinstance(shape, Array) else f"({', '.join(map(_bare, shape))})"
