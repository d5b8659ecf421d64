"""Text of a scheduled module -> computations and instructions, each parsed once, when it is asked for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memplan.errors import MemplanError
from memplan.xla.large_literals import LARGE_NBYTES
from memplan.xla.shapes import Array, Shape, leaves, read_shape, shape_text

BLOCKS = frozenset({"call", "conditional", "while"})  # what they call runs kernel by kernel, as the entry does

_HEADER = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_LINE = re.compile(r"\s*(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")  # root, name, shape, opcode, the rest
_CLOSED = re.compile(r"\)(?:, |$)")
METADATA = re.compile(r'\bmetadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
NAME = re.compile(r"%([\w.\-]+)")
_PREDECESSORS = re.compile(r"control-predecessors=\{([^}]*)\}")
_CONSTANT = re.compile(r"^.* = [a-z]\w*\[\d[^=]* constant\(.*$", re.MULTILINE)  # of an array
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|(?:true|false)_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_ALIAS = re.compile(r"\{(?P<output>[\d, ]*)\}: \((?P<argument>\d+), \{(?P<index>[\d, ]*)\}, (?:may|must)-alias\)")
_OF_THE_CALL = re.compile(  # the module's name, and where jax left arguments and results to XLA's partitioner
    r'fingerprint_before_lhs="[^"]*"|, allow_spmd_sharding_propagation_to_\w+=\{[a-z,]*\}'
)
_METADATA = re.compile(rf",? ?(?:{METADATA.pattern}|stack_frame_id=\d+)")
_WHOLE = re.compile(  # what arguments that were put on the one device have, and others have not
    r",? ?sharding=\{(?:mesh\[\], )?(?:replicated|\[(?:\{\}(?:, )?)*\])\}"
)

# XLA's number of a constant, which in a step with loops differs from one process to the next
_NUMBERED_CONSTANT = re.compile(r"\bconstant[._]\d[\w.]*")
_BY = re.compile(r'custom_call_target="([^"]+)"|"kind":"(?!kCustom)([^"]+)"')


class UnreadableModuleError(MemplanError, ValueError):
    """Text that is not a scheduled module as this version of memplan knows it."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: Shape  # of the result
    operands: tuple[str, ...]  # names, in order
    attributes: str  # what follows the operands; of a parameter its number, of a constant its value
    root: bool
    line: str = field(default="", repr=False, compare=False)  # as it stands

    @cached_property
    def result(self) -> tuple[Array, ...]:
        """The shape's leaves, in order."""
        return tuple(leaves(self.shape))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls."""
        return tuple(name for found in _CALLED.findall(self.attributes) for name in NAME.findall(found))

    @cached_property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.result)

    def attribute(self, name: str) -> str:
        """The text of an attribute up to the next comma or blank; "" if there is none."""
        found = re.search(rf"\b{re.escape(name)}=([^,\s]*)", self.attributes)
        return found[1] if found else ""

    def line_with(self, name: str, operands: Sequence[str]) -> str:
        """The line under another name, with other operands, as many as before or not."""
        line = self.line.replace(f"%{self.name} = ", f"%{name} = ", 1)
        if list(operands) == list(self.operands):
            return line
        before, opened, rest = line.partition(f" {self.opcode}(")
        _, closed, after = rest.partition(")")
        return before + opened + ", ".join(f"%{operand}" for operand in operands) + closed + after

    @property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        return int(self.attribute("index"))


@dataclass(frozen=True)
class Computation:
    """A computation in schedule order."""

    name: str
    text: str  # as it stands, without blank lines around it
    # lines that are the same in it need not be read again
    reuse_parse_of: Computation | None = field(default=None, repr=False, compare=False)
    # by kind of the fusion that calls it, which result may be written over which parameter (`aliasing`)
    alias_cache: dict[str, Sequence[tuple[int, int]]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def ops(self) -> Mapping[str, Instruction]:
        before = () if self.reuse_parse_of is None else self.reuse_parse_of.ops.values()
        known = {op.line: op for op in before}
        lines = self.text.split("\n")[1:-1]
        return {op.name: op for op in (known.get(line) or read_instruction(line) for line in lines)}

    @cached_property
    def root(self) -> Instruction:
        return next(op for op in self.ops.values() if op.root)

    @cached_property
    def uses(self) -> Mapping[str, Sequence[tuple[Instruction, int]]]:
        """For every instruction: its readers and the operand positions."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for position, name in enumerate(op.operands):
                found[name].append((op, position))
        return found

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {int(op.attributes): op for op in self.ops.values() if op.opcode == "parameter"}

    @cached_property
    def results(self) -> tuple[Instruction, ...]:
        """The results of the root, one instruction for each element of its tuple."""
        names = self.root.operands if self.root.opcode == "tuple" else (self.root.name,)
        return tuple(self.ops[name] for name in names)

    @cached_property
    def by_leaf(self) -> tuple[Instruction, ...]:
        """For every leaf of the root's results: its element, which may itself be a tuple."""
        return tuple(op for op in self.results for _ in op.result)

    def text_with(self, lines: Iterable[str]) -> str:
        """The text with other instructions."""
        first, *_, last = self.text.split("\n")
        return "\n".join([first, *lines, last])

    def behind_bitcasts(self, op: Instruction) -> Instruction:
        while op.opcode == "bitcast":
            op = self.ops[op.operands[0]]
        return op


@dataclass(frozen=True)
class Module(Mapping[str, Computation]):
    """A scheduled module: computations by name."""

    head: str  # what stands before the first computation: options, tables of files and stack frames
    texts: Mapping[str, str]  # of every computation, in order
    entry_name: str  # of the one that runs
    # computations that are the same in it need not be read again
    reuse_parse_of: Module | None = field(default=None, repr=False, compare=False)
    _parsed: dict[str, Computation] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, name: str) -> Computation:
        if name not in self._parsed:
            text = self.texts[name]
            known = self.reuse_parse_of
            parsed = known[name] if known is not None and name in known else None
            if parsed is None or parsed.text != text:
                parsed = Computation(name, text, parsed)
            self._parsed[name] = parsed
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def entry(self) -> Computation:
        return self[self.entry_name]

    def with_texts(self, texts: Mapping[str, str]) -> Module:
        """The module with other computations, itself with its own; what stays is not read again."""
        return self if texts is self.texts else Module(self.head, texts, self.entry_name, self)

    @property
    def name(self) -> str:
        return self.head.partition(" ")[2].partition(",")[0]

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Instructions of the entry and of the computations that it runs, by name; a fusion is one instruction."""
        return {op.name: op for op in self._run(self.entry)}

    def _run(self, body: Computation) -> Iterator[Instruction]:
        for op in body.ops.values():
            yield op
            if op.opcode in BLOCKS:
                for name in op.called:
                    yield from self._run(self[name])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the instructions and their order, without the module's name and source lines."""
        options = _OF_THE_CALL.sub("", self.head.partition("\n")[0].partition(",")[2])
        plain = (_WHOLE.sub("", _METADATA.sub("", text)) for text in self.texts.values())
        return _digest([options, *plain])

    @cached_property
    def structure(self) -> str:
        """Digest of what reads what, by name: it stays where XLA chooses other algorithms for the same kernels."""
        lines = (f"{op.name} {op.opcode} {' '.join(op.operands)}" for op in self.instructions.values())
        return _digest(lines)

    @cached_property
    def chosen_kernels(self) -> Mapping[str, str]:
        """For every autotuned kernel: its library or generator, and a digest of its configuration."""
        found: dict[str, str] = {}
        for op in self.instructions.values():
            if op.opcode == "custom-call" or "kind=kCustom" in op.attributes:
                by = _BY.search(op.attributes)
                told = shape_text(op.shape) + NAME.sub("", _METADATA.sub("", op.attributes))
                maker = (by[1] or by[2]) if by else op.opcode
                found[op.name] = f"{maker} {hashlib.sha256(told.encode()).hexdigest()[:8]}"
        return found

    @cached_property
    def aliases(self) -> Mapping[int, int]:
        """Number of an output -> number of the donated argument that it is written over.

        Raises:
          UnreadableModuleError: an argument or an output is a tuple of tuples, which jax never makes.
        """
        options = self.head.partition("\n")[0]
        begin = options.find("input_output_alias={")
        found: dict[int, int] = {}
        for one in _ALIAS.finditer(options, begin) if begin >= 0 else ():
            if one["index"] or "," in one["output"]:
                raise UnreadableModuleError(f"{self.name} donates a part of a tuple: {one[0]}.")
            found[int(one["output"] or 0)] = int(one["argument"])
        return found


def predecessors(op: Instruction) -> list[str]:
    """Names of instructions that must run before it although it does not read them."""
    found = _PREDECESSORS.search(op.attributes)
    return NAME.findall(found[1]) if found else []


def without_metadata(attributes: str) -> str:
    """Attributes of an instruction without where it comes from."""
    return _METADATA.sub("", attributes).lstrip(", ")


class Names:
    """Names of a module, and new ones: the old name, a mark and a number."""

    def __init__(self, module: Module) -> None:
        self._taken = {name for body in module.values() for name in body.ops} | set(module)

    def fresh(self, name: str, mark: str, number: int = 1) -> str:
        """The first from this number on that is not taken."""
        while (found := f"{name}.{mark}{number}") in self._taken:
            number += 1
        self._taken.add(found)
        return found


def _digest(lines: Iterable[str]) -> str:
    """Digest of lines, with constants named by the order of their first use."""
    order: dict[str, str] = {}
    text = _NUMBERED_CONSTANT.sub(lambda name: order.setdefault(name[0], f"constant#{len(order)}"), "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()


def read_module(text: str, reuse_parse_of: Module | None = None, scheduled: bool = True) -> Module:
    """The computations of a module, as XLA prints it.

    Args:
      reuse_parse_of: see `Module`.
      scheduled: refuse a module whose order is not that in which it runs.

    Raises:
      UnreadableModuleError: the text is not one.
    """
    texts: dict[str, str] = {}
    head: list[str] = []
    current: list[str] | None = None
    name = entry = ""
    for line in text.split("\n"):
        if current is None:
            if header := _HEADER.match(line):
                name, current = header["name"], [line]
                entry = name if line.startswith("ENTRY ") else entry
            elif not texts:
                head.append(line)
        else:
            current.append(line)
            if line.startswith("}"):
                texts[name], current = "\n".join(current), None
    if not entry or (scheduled and "is_scheduled=true" not in (head[0] if head else "")):
        raise UnreadableModuleError(
            "This is not scheduled HLO; pass the text of `jax.jit(step).lower(...).compile().as_text()`."
        )
    return Module("\n".join(head).rstrip("\n"), texts, entry, reuse_parse_of)


def read_instruction(line: str) -> Instruction:
    """One line.

    Raises:
      UnreadableModuleError: it is none.
    """
    found = _LINE.match(line)
    if not found:
        raise UnreadableModuleError(f"memplan cannot read this line of a compiled module: {line.strip()[:200]}")
    root, name, shape, opcode, rest = found.groups()
    operands, attributes = _operands_and_attributes(rest, opcode in ("parameter", "constant"))
    return Instruction(name, opcode, read_shape(shape), tuple(NAME.findall(operands)), attributes, bool(root), line)


def _operands_and_attributes(rest: str, literal: bool) -> tuple[str, str]:
    """Split the text after an opening parenthesis; a parameter's or constant's literal is an attribute."""
    closed = _CLOSED.search(rest)
    operands, attributes = (rest[: closed.start()], rest[closed.end() :]) if closed else (rest, "")
    if not literal:
        return operands, attributes
    return "", f"{operands}, {attributes}" if operands == "{...}" else operands  # which large one it is


def large_constants(text: str) -> list[Instruction]:
    """Constants of a module or a computation that take as much as what is set aside, those within fusions among them.

    The device holds them beside what `memory_analysis()` counts, one for each instruction: XLA:GPU makes them globals
    of the code that it loads. Smaller ones are counted as XLA counts them, not at all.
    """
    return [op for line in _CONSTANT.findall(text) if (op := read_instruction(line)).nbytes >= LARGE_NBYTES]


def with_blocks(module: Module, body: Computation) -> Iterator[Computation]:
    """A computation, the bodies and conditions of its loops, the branches of its conditionals, and what it calls."""
    yield body
    for op in body.ops.values():
        if op.opcode in BLOCKS:
            for name in op.called:
                yield from with_blocks(module, module[name])
