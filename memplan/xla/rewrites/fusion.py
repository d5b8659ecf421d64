"""Fusions and the computations that they call, written anew."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from memplan.xla.module import Array, Computation, Instruction, Names, Shape, read_instruction, spelled
from memplan.xla.sharing import ELEMENTWISE

CHEAP = ELEMENTWISE | {"broadcast", "bitcast", "constant", "iota", "parameter"}
"""What costs next to nothing beside the bytes that a fusion moves, and may be done twice."""
AFTER = re.compile(r", control-predecessors=\{[^}]*\}")  # the order of the text says as much
NAMING = frozenset({"bitcast", "get-tuple-element"})
_HOLDING = frozenset({"tuple", "opt-barrier", "add-dependency", "after-all"})  # who reads through these is not known
LEAST_BYTES = 1 << 20  # of a value: a fast GPU reads as much in a fifth of the time that a launch takes


def is_open(op: Instruction) -> bool:
    """A fusion whose emitter takes whatever is in it."""
    return op.opcode == "fusion" and op.attribute("kind") in ("kLoop", "kInput")


def source(body: Computation, name: str) -> str:
    """The buffer behind bitcasts, as a problem names it."""
    op = body.behind_bitcasts(body.ops[name])
    return f"{op.operands[0]}{{{op.index}}}" if op.opcode == "get-tuple-element" else op.name


def results_of(op: Instruction) -> tuple[str, ...]:
    """Its results, as a problem names their buffers."""
    return tuple(f"{op.name}{{{leaf}}}" for leaf in range(len(op.shape))) if isinstance(op.shape, tuple) else (op.name,)


def readers_of(body: Computation, maker: Instruction, name: str) -> set[str] | None:
    """Kernels that read a result, named as a problem names it; None where it is handed to more than kernels."""
    found = set[str]()
    if isinstance(maker.shape, tuple) and any(user.opcode != "get-tuple-element" for user, _ in body.uses[maker.name]):
        return None
    todo = [user for user, _ in body.uses[maker.name] if name == maker.name or source(body, user.name) == name]
    while todo:
        user = todo.pop()
        if user.root or user.opcode in _HOLDING:
            return None
        if user.opcode in NAMING:
            todo += [one for one, _ in body.uses[user.name]]
        else:
            found.add(user.name)
    return found


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


def rewritten(texts: Mapping[str, str], name: str, text: str, new: Mapping[str, str]) -> dict[str, str]:
    """Texts of computations with another one for a name, and those that are new in front of it."""
    found: dict[str, str] = {}
    for known, old in texts.items():
        found.update({**new, name: text} if known == name else {known: old})
    return found


def only(fused: Computation, leaves: Sequence[int], names: Names) -> list[Instruction]:
    """What makes some of the results, parameters apart, the root last."""
    results = [fused.results[leaf] for leaf in leaves]
    wanted = {result.name for result in results}
    for op in reversed(list(fused.ops.values())):
        if op.name in wanted:
            wanted.update(op.operands)
    ops = [op for op in fused.ops.values() if op.name in wanted and op.opcode != "parameter" and not op.root]
    return returning(ops, results, names.fresh(fused.root.name, "in"))


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
