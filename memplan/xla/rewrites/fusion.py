"""Fusions and the computations that they call: queries, and how to rewrite them."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from memplan.xla.aliasing import ELEMENTWISE
from memplan.xla.module import Computation, Instruction, Names, read_instruction
from memplan.xla.shapes import Array, Shape, shape_text

CHEAP = ELEMENTWISE | {"broadcast", "bitcast", "constant", "iota", "parameter"}
"""Opcodes that cost little beside the bytes that a fusion moves, and may be repeated."""
AFTER = re.compile(r", control-predecessors=\{[^}]*\}")  # the order of the text already implies it
NAMING = frozenset({"bitcast", "get-tuple-element"})
_HOLDING = frozenset({"tuple", "opt-barrier", "add-dependency", "after-all"})  # the readers behind these are unknown
_INDEX = re.compile(r"\bindex=\d+")
LEAST_BYTES = 1 << 20
"""Least bytes of a value for which fusions are rewritten: a fast GPU reads as much in a fifth of a launch's time."""


def is_open(op: Instruction) -> bool:
    """A fusion whose emitter accepts any instruction."""
    return op.opcode == "fusion" and op.attribute("kind") in ("kLoop", "kInput")


def buffer_of(body: Computation, name: str) -> str:
    """The buffer behind bitcasts, as a problem names it."""
    op = body.behind_bitcasts(body.ops[name])
    return f"{op.operands[0]}{{{op.index}}}" if op.opcode == "get-tuple-element" else op.name


def result_buffers(op: Instruction) -> tuple[str, ...]:
    """Buffers of its results, as a problem names them."""
    return tuple(f"{op.name}{{{leaf}}}" for leaf in range(len(op.shape))) if isinstance(op.shape, tuple) else (op.name,)


def has_tuple_readers(body: Computation, op: Instruction) -> bool:
    """Is its tuple read as a whole?"""
    return isinstance(op.shape, tuple) and any(user.opcode != "get-tuple-element" for user, _ in body.uses[op.name])


def readers_of(body: Computation, maker: Instruction, name: str) -> set[str] | None:
    """Kernels that read a result, named as a problem names it; None if it is passed to something else than kernels."""
    found = set[str]()
    if has_tuple_readers(body, maker):
        return None
    todo = [user for user, _ in body.uses[maker.name] if name == maker.name or buffer_of(body, user.name) == name]
    while todo:
        user = todo.pop()
        if user.root or user.opcode in _HOLDING:
            return None
        if user.opcode in NAMING:
            todo += [one for one, _ in body.uses[user.name]]
        else:
            found.add(user.name)
    return found


def backward_slice(
    ops: Mapping[str, Instruction], wanted: Iterable[str], given: Collection[str] = ()
) -> list[Instruction]:
    """The producers of some values of a computation, in order, up to the given values."""
    needed = set(wanted)
    for op in reversed(list(ops.values())):
        if op.name in needed and op.name not in given:
            needed.update(op.operands)
    return [op for op in ops.values() if op.name in needed]


def rename_operands(op: Instruction, now: Mapping[str, str]) -> str:
    """The instruction's line with operands renamed."""
    return op.line_with(op.name, [now.get(name, name) for name in op.operands])


def bitcast(name: str, shape: Shape, operand: str) -> Instruction:
    return read_instruction(f"  %{name} = {shape_text(shape)} bitcast(%{operand})")


def tuple_element(name: str, shape: Shape, operand: str, index: int) -> Instruction:
    return read_instruction(f"  %{name} = {shape_text(shape)} get-tuple-element(%{operand}), index={index}")


def renumber(element: Instruction, index: int) -> str:
    """The line of a get-tuple-element with another index."""
    return _INDEX.sub(f"index={index}", element.line, count=1)


def with_root(ops: Sequence[Instruction], results: Sequence[Instruction], name: str) -> list[Instruction]:
    """The instructions with a root: the one result, or a tuple of several, with this name."""
    if len(results) == 1:
        (result,) = results
        root = result if result.root else read_instruction(result.line.replace("  %", "  ROOT %", 1))
        return [op for op in ops if op.name != result.name] + [root]
    shape, given = tuple(result.shape for result in results), ", ".join(f"%{result.name}" for result in results)
    return [*ops, read_instruction(f"  ROOT %{name} = {shape_text(shape)} tuple({given})")]


def insert(texts: Mapping[str, str], name: str, text: str, new: Mapping[str, str]) -> dict[str, str]:
    """Texts of computations with one replaced, and the new ones before it."""
    found: dict[str, str] = {}
    for known, old in texts.items():
        found.update({**new, name: text} if known == name else {known: old})
    return found


def new_fusion(
    op: Instruction,
    name: str,
    called: str,
    operands: Sequence[str],
    parameters: Sequence[tuple[str, Shape]],
    ops: Sequence[Instruction],
) -> tuple[Instruction, str]:
    """A fusion of another one's kind, and the text of its computation.

    Args:
      op: the other fusion.
      name, called: of the new fusion, and of its computation.
      ops: instructions of the computation without parameters; one is the root.
    """
    shape = next(one for one in ops if one.root).shape
    return read_instruction(_fusion_line(op, name, shape, operands, called)), fused_text(called, parameters, ops)


def slice_fusion(
    op: Instruction, fused: Computation, leaves: Sequence[int], name: str, called: str, names: Names
) -> tuple[Instruction, str]:
    """A fusion that computes only these results of another one, and the text of its computation."""
    results = [fused.results[leaf] for leaf in leaves]
    needed = backward_slice(fused.ops, (result.name for result in results))
    inside = [one for one in needed if one.opcode != "parameter" and not one.root]
    ops = with_root(inside, results, names.fresh(fused.root.name, "in"))
    read = {operand for one in ops for operand in one.operands} | {ops[-1].name}
    given = [number for number in range(len(op.operands)) if fused.parameters[number].name in read]
    parameters = [(fused.parameters[number].name, fused.parameters[number].shape) for number in given]
    return new_fusion(op, name, called, [op.operands[number] for number in given], parameters, ops)


def _fusion_line(op: Instruction, name: str, shape: Shape, operands: Sequence[str], called: str) -> str:
    left, _, right = op.line_with(name, operands).partition(" = ")
    _, opened, rest = right.partition(" fusion(")
    rest = re.sub(rf"calls=%{re.escape(op.called[0])}(?![\w.\-])", f"calls=%{called}", rest)
    return f"{left} = {shape_text(shape)}{opened}{rest}"


def fused_text(name: str, parameters: Sequence[tuple[str, Shape]], ops: Sequence[Instruction]) -> str:
    """Text of a fused computation with these parameters and instructions, one of which is the root."""
    given = ", ".join(f"{one}: {_bare(shape)}" for one, shape in parameters)
    root = next(op for op in ops if op.root)
    lines = [f"  %{one} = {shape_text(shape)} parameter({n})" for n, (one, shape) in enumerate(parameters)]
    return "\n".join([f"%{name} ({given}) -> {_bare(root.shape)} {{", *lines, *(op.line for op in ops), "}"])


def _bare(shape: Shape) -> str:
    """The shape without layouts, as in a computation's first line."""
    return str(Array(shape.dtype, shape.dims)) if isinstance(shape, Array) else f"({', '.join(map(_bare, shape))})"


_ONE_BY_ONE = frozenset({"sine", "cosine", "tan", "power", "atan2"})
_INTEGER = re.compile(r"[su]\d+")


def keeps_bits(fused: Computation, result: Instruction) -> bool:
    """Does a value of a fusion have the same bits inside of the fusion as after it is written and read again?

    XLA:GPU rounds every product, sum and conversion inside of a fusion as between two: its PTX says `mul.rn` and
    `add.rn`, which are never contracted, and rounds to float16 and back. One pair becomes one operation: an integer
    converted to a float and then to a narrower one (MLIR's `TruncFSIToFPToSIToFP`).
    """
    made = fused.behind_bitcasts(result)
    if made.opcode != "convert":
        return True
    (given,) = (fused.ops[name].shape for name in made.operands)
    return not (isinstance(given, Array) and _INTEGER.fullmatch(given.dtype))


def narrowest_bits(op: Instruction, operands: Iterable[Instruction]) -> tuple[int, int]:
    """Bits of an element of the narrowest array that a fusion reads, and that it makes.

    A sum over many elements adds them in an order that follows from its shape, from this width, and from whether
    something in the fusion `prevents_vectorization` (XLA's `ReductionFusion`, `MayPreventVectorization`).
    """
    read = (array.bits for one in operands for array in one.result)
    return min(read, default=0), min(array.bits for array in op.result)


def prevents_vectorization(fused: Computation) -> bool:
    """Does it prevent the sums of its fusion from reading several elements at once?"""
    return not _ONE_BY_ONE.isdisjoint(op.opcode for op in fused.ops.values())
