"""A module's metadata -> the line of the user's code and the scope behind every instruction."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice

from memplan.program import compat
from memplan.program.pins import MARK
from memplan.xla.module import Computation, Instruction, Module, large_constants

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
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

_Frames = Mapping[int, tuple[tuple[str, str], int]]  # number -> (file, line), number of the frame around it


class Sources:
    """Results of a module -> the line of the user's code and the scope behind each, of those outside of fusions.

    XLA gives no metadata to fusions of several results, and to the copies and conversions that it adds. For these tells
    what they compute, else what they read, else what reads them. An argument has neither line nor scope.
    """

    def __init__(self, module: Module) -> None:
        self._source_of = finder(module)
        self._tellers = _tellers(module)

    def line(self, name: str, leaf: int = 0) -> str:
        """`file:line` of an instruction's result, or ''.

        It is the innermost line of the user's own. Libraries are passed over, unless nothing else called them, and
        memplan's files always.
        """
        told = self._tellers.get((name, leaf))
        return self._source_of(told) if told is not None else ""

    def scope(self, name: str, leaf: int = 0) -> str:
        """jax's name stack, as `transpose(jvp(UNet))/down_0/conv`, or ''."""
        told = self._tellers.get((name, leaf))
        named = _NAMED.search(told.line) if told is not None else None
        return named[1] if named else ""


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


def _tellers(module: Module) -> dict[tuple[str, int], Instruction]:
    """Name and leaf of a result -> the instruction whose metadata tells where it comes from."""
    found: dict[tuple[str, int], Instruction] = {}
    ops = module.instructions
    for op in ops.values():
        tells = _MADE.search(op.line) is not None
        for leaf in range(len(op.result)):
            computed = _computed(module[op.called[0]], leaf) if op.opcode == "fusion" and not tells else ()
            read = (found[one] for one in _read(ops, op, leaf) if one in found)
            if told := op if tells else next(chain(computed, read), None):
                found[op.name, leaf] = told
    for op in reversed(list(ops.values())):
        for name in op.operands if (op.name, 0) in found else ():
            for leaf in range(len(ops[name].result) if ops[name].opcode != "parameter" else 0):
                found.setdefault((name, leaf), found[op.name, 0])
    return found


def _computed(fused: Computation, leaf: int) -> Iterator[Instruction]:
    """Those that tell, of what a result of a fusion is computed from, the nearest first."""
    names = [made.name for made in fused.by_leaf[leaf : leaf + 1]]  # none for a result that it does not have here
    for name in names:  # which grows
        if _MADE.search(fused.ops[name].line):
            yield fused.ops[name]
        names += [operand for operand in fused.ops[name].operands if operand not in names]


def _read(ops: Mapping[str, Instruction], op: Instruction, leaf: int) -> Iterator[tuple[str, int]]:
    """Names and leaves of what a result is made from, the likeliest first."""
    if op.opcode == "tuple":
        elements = ((name, inner) for name in op.operands for inner in range(len(ops[name].result)))
        yield from islice(elements, leaf, leaf + 1)
    elif op.opcode == "get-tuple-element":
        yield op.operands[0], op.index
    else:
        yield from ((name, inner) for inner in (leaf, 0) for name in op.operands)


def _line(frame: int, frames: _Frames) -> str:
    """The line of the user's innermost frame, else of the innermost library frame."""
    file, line = compat.users_line([place for place in _outward(frame, frames) if place[0]])
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
