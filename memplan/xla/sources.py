"""A module's metadata -> the line of the user's code and the scope behind every instruction."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice

from memplan.program import compat
from memplan.program.pins import MARK
from memplan.xla.module import Computation, Frame, Instruction, Module

# The scope in an `op_name`: what stands between the step and the primitive.
_SCOPE = re.compile(r'jit\([^/"]*/(.*)/')
_WRAPPED = re.compile(r"\b[\w.\-]+\(([^()]*)\)")
_CALLED = re.compile(r"\b(?:jit|pjit|shard_map)\([^()]*\)")
_COMBINED = re.compile(r"(^|/)\(.*")  # the scopes of a collective that XLA combined of several
_NO_LAYER = re.compile(
    r"""(?x: while | body | cond | closed_call | branch_\d+_fun | checkpoint | rematted_computation
    | eval_jaxpr )"""
    rf"|{MARK.pattern}"
)


class Sources:
    """Finds the line of the user's code and the scope of every result outside of fusions.

    XLA gives no metadata to fusions of several results, nor to the copies and conversions that it
    adds. These take the metadata of their producers, operands or users, in that order. An argument
    has neither line nor scope.
    """

    def __init__(self, module: Module) -> None:
        self._source_of = finder(module)
        self._origins = _origins(module)

    def line(self, name: str, leaf: int = 0) -> str:
        """`file:line` of an instruction's result, or ''.

        It is the innermost line of the user's own. A line of a library is named only if no line of
        the user called it, a line of memplan never.
        """
        origin = self._origins.get((name, leaf))
        return self._source_of(origin) if origin is not None else ""

    def scope(self, name: str, leaf: int = 0) -> str:
        """jax's name stack, as `transpose(jvp(UNet))/down_0/conv`, or ''."""
        origin = self._origins.get((name, leaf))
        scope = _SCOPE.match(origin.op_name) if origin is not None else None
        return scope[1] if scope else ""


def finder(module: Module) -> Callable[[Instruction], str]:
    """A function that gives the `file:line` of an instruction, or '' if it has no metadata.

    It also takes instructions inside fusions.
    """
    frames = module.frames
    lines = {number: _line(number, frames) for number in frames}
    return lambda op: lines.get(op.frame, "")


def constants(module: Module) -> Iterator[tuple[Instruction, str]]:
    """Large constants, each with the `file:line` of its reader, or ''."""
    source_of = finder(module)
    for body in module.values():
        for op in body.large_constants:
            readers = _readers(module, body, op)
            yield op, next(filter(None, map(source_of, (op, *readers))), "")


def _readers(module: Module, body: Computation, op: Instruction) -> Iterator[Instruction]:
    """Readers of an instruction, including those inside fusions."""
    for reader, position in body.uses[op.name]:
        yield reader
        if reader.opcode == "fusion":
            (fused,) = map(module.__getitem__, reader.called)
            yield from _readers(module, fused, fused.parameters[position])


def layer_of(scope: str) -> str:
    """The layer in a name stack.

    For example, `transpose(jvp(UNet))/down_0/down_0.norm/Conv_0` is in `UNet/down_0/Conv_0`. A
    collective that XLA combined, `UNet/down_0/(Conv_0/sum:Conv_1/sum`, is in `UNet/down_0`.
    """
    scope = _CALLED.sub("", scope)
    while (bare := _WRAPPED.sub(r"\1", scope)) != scope:
        scope = bare
    scope = _COMBINED.sub("", scope)
    parts: list[str] = []
    for part in scope.split("/"):
        method = parts and part.startswith(f"{parts[-1]}.")
        if part and not method and not _NO_LAYER.fullmatch(part):
            parts.append(part)
    return "/".join(parts)


def _origins(module: Module) -> dict[tuple[str, int], Instruction]:
    """Name and leaf of a result -> the instruction whose metadata it takes."""
    origins: dict[tuple[str, int], Instruction] = {}
    ops = module.instructions
    for op in ops.values():
        for leaf in range(len(op.result)):
            origin = op if op.frame else _origin(module, op, leaf, origins)
            if origin is not None:
                origins[op.name, leaf] = origin
    for op in reversed(list(ops.values())):
        origin = origins.get((op.name, 0))
        for name in op.operands if origin is not None else ():
            for leaf in range(len(ops[name].result) if ops[name].opcode != "parameter" else 0):
                origins.setdefault((name, leaf), origins[op.name, 0])
    return origins


def _origin(
    module: Module,
    op: Instruction,
    leaf: int,
    origins: Mapping[tuple[str, int], Instruction],
) -> Instruction | None:
    """The producer of a result inside a fusion, else the origin of an operand."""
    producers = _producers(module[op.called[0]], leaf) if op.opcode == "fusion" else ()
    operands = _operands(module.instructions, op, leaf)
    return next(chain(producers, (origins[key] for key in operands if key in origins)), None)


def _producers(fused: Computation, leaf: int) -> Iterator[Instruction]:
    """Instructions with metadata from which a fusion computes a result, the nearest first."""
    # The queue of names grows while it is read. It is empty for a library's workspace.
    names = [producer.name for producer in fused.by_leaf[leaf : leaf + 1]]
    for name in names:
        if fused.ops[name].frame:
            yield fused.ops[name]
        names += [operand for operand in fused.ops[name].operands if operand not in names]


def _operands(
    ops: Mapping[str, Instruction],
    op: Instruction,
    leaf: int,
) -> Iterator[tuple[str, int]]:
    """Names and leaves of the operands of a result, the likeliest origin first."""
    if op.opcode == "tuple":
        elements = ((name, inner) for name in op.operands for inner in range(len(ops[name].result)))
        yield from islice(elements, leaf, leaf + 1)
    elif op.opcode == "get-tuple-element":
        yield op.operands[0], op.index
    else:
        yield from ((name, inner) for inner in (leaf, 0) for name in op.operands)


def _line(number: int, frames: Mapping[int, Frame]) -> str:
    """The line of the user's innermost frame, else of the innermost library frame."""
    stack = [(frame.file, str(frame.line)) for frame in _outward(number, frames) if frame.file]
    file, line = compat.users_line(stack)
    return compat.relative(f"{file}:{line}") if file else ""


def _outward(number: int, frames: Mapping[int, Frame]) -> Iterator[Frame]:
    """The frame and those around it, innermost first."""
    visited: set[int] = set()
    while number in frames and number not in visited:
        visited.add(number)
        yield frames[number]
        number = frames[number].parent
