"""A module's metadata -> the line of the user's code and the scope behind every instruction."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from memplan.program import compat
from memplan.program.pins import MARK
from memplan.xla.module import Computation, Instruction, Module, large_constants

_OWN = str(Path(__file__).parents[1]) + os.sep

_FILE = re.compile(r'^(?P<id>\d+) "(?P<name>.*)"$')
_LOCATION = re.compile(r"^(?P<id>\d+) \{file_name_id=(?P<file>\d+) .*?\bline=(?P<line>\d+)\b")
_FRAME = re.compile(r"^(?P<id>\d+) \{file_location_id=(?P<location>\d+)(?: parent_frame_id=(?P<parent>\d+))?")
_MADE = re.compile(r"\bstack_frame_id=(\d+)")
_NAMED = re.compile(r'\bop_name="jit\([^/"]*/((?:[^"\\]|\\.)*)/')  # the step, what is between, the primitive
_WRAPPED = re.compile(r"\b[\w.\-]+\(([^()]*)\)")
_CALLED = re.compile(r"\b(?:jit|pjit|shard_map)\([^()]*\)")
_NO_LAYER = re.compile(
    rf"while|body|cond|closed_call|branch_\d+_fun|checkpoint|rematted_computation|eval_jaxpr|{MARK.pattern}"
)
_COPIES = ("bitcast", "copy", "copy-done", "copy-start", "get-tuple-element")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

_Frames = Mapping[int, tuple[tuple[str, str], int]]  # number -> (file, line), number of the frame around it


def sources(module: Module) -> dict[str, str]:
    """Instruction name -> `file:line`, of those outside of fusions that tell.

    It is the innermost line of the user's own. Libraries are passed over, unless nothing else called them, and
    memplan's files always.
    """
    source_of = finder(module)
    return {op.name: line for op in module.instructions.values() if (line := source_of(op))}


def finder(module: Module) -> Callable[[Instruction], str]:
    """A function that says the `file:line` of an instruction, also of one within a fusion; '' if that does not tell."""
    frames = _frames(_tables(module.head))
    lines = {str(frame): _line(frame, frames) for frame in frames}
    return lambda op: lines.get(made[1], "") if (made := _MADE.search(op.line)) else ""


def constants(module: Module) -> Iterator[tuple[Instruction, str]]:
    """Large constants, and the `file:line` of what reads them, or ''."""
    source_of = finder(module)
    for name, text in module.texts.items():
        for op in large_constants(text):
            readers = _readers(module, module[name], op)
            yield op, next(filter(None, map(source_of, (op, *readers))), "")


def _readers(module: Module, body: Computation, op: Instruction) -> Iterator[Instruction]:
    """The instructions that read another, and within fusions those that read the parameter."""
    for reader, position in body.uses[op.name]:
        yield reader
        if reader.opcode == "fusion":
            (inner,) = map(module.__getitem__, reader.called)
            yield from _readers(module, inner, inner.parameters[position])


def scope(op: Instruction) -> str:
    """jax's name stack, as `transpose(jvp(UNet))/down_0/conv`; '' if the instruction does not tell."""
    return named[1] if (named := _NAMED.search(op.line)) else ""


def teller(module: Module, op: Instruction, leaf: int = 0) -> Instruction:
    """The instruction that tells where a result of another comes from; that one itself if none does.

    XLA writes no metadata for fusions of several results, and for copies of its own: what they compute or copy tells.
    """
    if _MADE.search(op.line):
        return op
    if op.opcode in _COPIES:
        copied = module.instructions[op.operands[0]]
        return teller(module, copied, op.index if op.opcode == "get-tuple-element" else leaf)
    if op.opcode != "fusion":
        return op
    fused = module[op.called[0]]
    names = [made.name for made in fused.by_leaf[leaf : leaf + 1]]  # none for a result that it does not have here
    for name in names:  # which grows: the result first, then what it is computed from
        if _MADE.search(fused.ops[name].line):
            return fused.ops[name]
        names += [operand for operand in fused.ops[name].operands if operand not in names]
    return op


def layer_of(scope: str) -> str:
    """The layer in a name stack: `transpose(jvp(UNet))/down_0/down_0.norm/Conv_0` -> `UNet/down_0/Conv_0`."""
    scope = _CALLED.sub("", scope)
    while (bare := _WRAPPED.sub(r"\1", scope)) != scope:
        scope = bare
    parts: list[str] = []
    for part in scope.split("/"):
        method = parts and part.startswith(f"{parts[-1]}.")
        if part and not method and not _NO_LAYER.fullmatch(part):
            parts.append(part)
    return "/".join(parts)


def _line(frame: int, frames: _Frames) -> str:
    """The line of the user's innermost frame, else of the innermost library frame."""
    way = [place for place in _outward(frame, frames) if place[0] and not place[0].startswith(_OWN)]
    own = [(file, line) for file, line in way if not compat.is_installed(file)]
    file, line = next(iter(own or way), ("", ""))
    return compat.relative(f"{file}:{line}") if file else ""


def _outward(frame: int, frames: _Frames) -> Iterator[tuple[str, str]]:
    """The frame and those around it. XLA writes the number after that of the frame around, 1 where there is none."""
    seen: set[int] = set()
    while frame in frames and frame not in seen:
        seen.add(frame)
        place, parent = frames[frame]
        yield place
        frame = parent - 1


def _frames(tables: Mapping[str, list[str]]) -> _Frames:
    files = {match["id"]: match["name"] for line in tables["FileNames"] if (match := _FILE.match(line))}
    where = {
        match["id"]: (files.get(match["file"], ""), match["line"])
        for line in tables["FileLocations"]
        if (match := _LOCATION.match(line))
    }
    return {
        int(match["id"]): (where.get(match["location"], ("", "")), int(match["parent"] or 0))
        for line in tables["StackFrames"]
        if (match := _FRAME.match(line))
    }


def _tables(head: str) -> Mapping[str, list[str]]:
    """The lines of the tables in front of the computations."""
    tables: dict[str, list[str]] = {name: [] for name in _TABLES}
    current: list[str] | None = None
    for line in head.split("\n"):
        if line in tables:
            current = tables[line]
        elif current is not None:
            current.append(line)
    return tables
