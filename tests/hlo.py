"""Modules that tests write as text, read by XLA's parser, and XLA's print of modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.hardware.machine import Groups
from memplan.program import compat
from memplan.xla.module import Computation, Instruction, Module
from memplan.xla.schema import ModuleMessage
from memplan.xla.serialize import serialize

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_LINE = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_NAME = re.compile(r"(?<![={])%([\w.\-]+)|(?<=control-predecessors=\{)%([\w.\-]+)")
_LAYOUT = re.compile(r"(\b[a-z]\w*\[[\d,]*\])\{[\d,]*\}")
_FRAME = re.compile(r",? ?\bstack_frame_id=(\d+)")
_TABLE = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n?)*)", re.MULTILINE
)
_FILE = re.compile(r'^\d+ "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^\d+ \{file_name_id=(\d+) .*?\bline=(\d+)\b", re.MULTILINE)
_STACK_FRAME = re.compile(r"^\d+ \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
# Attributes with these names belong to an asynchronous pair, all others to what it does.
_OF_THE_PAIR = (
    "output_to_operand_aliasing",
    "metadata",
    "backend_config",
    "control-predecessors",
    "frontend_attributes",
)


def read_module(text: str, scheduled: bool = True) -> Module:
    """The module of a text.

    The text may say anything in the signatures of computations, use a name in several of them, and
    put a reader in front of what it reads; stack frames are kept.
    """
    parsed = _parse(text)
    message = ModuleMessage.FromString(compat.module_proto(parsed.parsable()))
    parsed.restore_names(message)
    _restore_frames(message, parsed)
    module = Module.read(message.SerializeToString(), scheduled)
    return module.with_computations(
        {name: parsed.computations[name].restored(body) for name, body in module.items()}
    )


def read_instruction(line: str, *computations: str) -> Instruction:
    """The instruction of a line, with parameters of its own shape as operands.

    Args:
      computations: texts of those that it calls, if they are not a sum.
    """
    match = _LINE.match(line)
    assert match, line
    operands = [] if match["opcode"] in ("parameter", "constant") else _operands(match["rest"])
    shape = match["shape"].split(" ")[0] if not match["shape"].startswith("(") else match["shape"]
    parameters = [
        f"  %{name} = {shape} parameter({number})" for number, name in enumerate(operands)
    ]
    called = re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", line)
    sums = [_SUM.replace("%add ", f"%{name} ") for name in called]
    is_root = line.lstrip().startswith("ROOT ")
    body = "\n".join([*parameters, line if is_root else f"  ROOT {line.strip()}"])
    text = "\n\n".join(
        ["HloModule one", *(computations or sums), f"ENTRY %main () -> () {{\n{body}\n}}\n"]
    )
    op = read_module(text, scheduled=False).entry.ops[match["name"]]
    return op if is_root else op.changed(root=False)


_SUM = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}"""


def text_of(module: Module) -> str:
    """XLA's print of a module."""
    return compat.module_text(serialize(module))


def lines_of(module: Module, name: str = "") -> list[str]:
    """XLA's print of the instructions of a computation, of the entry by default."""
    printed = _parse(text_of(module))
    return [line.strip() for line in printed.computations[name or module.entry_name].lines.values()]


def short_lines_of(module: Module, name: str = "") -> list[str]:
    """The same without layouts, and without where instructions come from."""
    lines = (_LAYOUT.sub(r"\1", line) for line in lines_of(module, name))
    return [re.sub(", (?:frontend_attributes|metadata)=.*", "", line) for line in lines]


def groups_text(groups: Groups) -> str:
    """Groups of partitions as HLO lists them."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def texts_of(module: Module) -> Mapping[str, str]:
    """XLA's print of all instructions of each computation."""
    printed = _parse(text_of(module))
    return {name: "\n".join(body.lines.values()) for name, body in printed.computations.items()}


def replaced(module: Module, old: str, new: str, name: str = "") -> Module:
    """The module with another piece of text, everywhere or in one computation."""
    text = text_of(module)
    if not name:
        assert old in text, f"{old} is not in\n{text}"
        return read_module(text.replace(old, new), module.is_scheduled)
    begin = re.search(rf"^(?:ENTRY )?%{re.escape(name)} .*\{{$", text, re.MULTILINE)
    assert begin
    end = text.index("\n}", begin.start())
    body = text[begin.start() : end]
    assert old in body, f"{old} is not in\n{body}"
    return read_module(
        text[: begin.start()] + body.replace(old, new) + text[end:], module.is_scheduled
    )


@dataclass
class _Body:
    """The text of a computation.

    Attributes:
      lines: of instructions by name, in order.
      unique: names that are no other computation's.
    """

    first_line: str
    lines: dict[str, str] = field(default_factory=dict)
    unique: dict[str, str] = field(default_factory=dict)

    def parsable(self) -> Iterator[str]:
        """Lines without a signature, each behind what it reads."""
        yield f"{self.first_line.split(' (')[0]} {{" if " (" in self.first_line else self.first_line
        written = set[str]()

        def write(name: str) -> Iterator[str]:
            if name in self.lines and name not in written:
                written.add(name)
                for operand in _names(self.lines[name])[1:]:
                    yield from write(operand)
                yield _NAME.sub(self._unique_name, _FRAME.sub("", self.lines[name]))

        for name in self.lines:
            yield from write(name)
        yield "}"

    def _unique_name(self, match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return f"%{self.unique.get(name, name)}"

    def restored(self, body: Computation) -> Computation:
        """What was read from it, in its order, a fusion with names that may be another's."""
        names = {unique: name for name, unique in self.unique.items()} if body.is_fused else {}
        ops = [
            op.changed(
                name=names.get(op.name, op.name),
                operands=[names.get(operand, operand) for operand in op.operands],
            )
            for op in body.ops.values()
        ]
        by_name = {op.name: op for op in ops}
        order = list(self.lines) if body.is_fused else list(self.unique.values())
        if list(by_name) == order == list(body.ops):
            return body
        assert sorted(by_name) == sorted(order), (sorted(by_name), sorted(order))
        return body.with_ops(by_name[name] for name in order)


@dataclass
class _Text:
    head: list[str] = field(default_factory=list)
    computations: dict[str, _Body] = field(default_factory=dict)

    def parsable(self) -> str:
        """With names that XLA's parser leaves as they are: it takes a number at the end for its own."""
        head = [line for line in self.head if line.startswith("HloModule")]
        bodies = ("\n".join(body.parsable()) for body in self.computations.values())
        text = expand_async_pairs("\n\n".join([*head, *bodies]) + "\n")
        return _ANY_NAME.sub(lambda match: f"%{_marked(match[1])}" if match[1] else match[0], text)

    def restore_names(self, message: Any) -> None:
        message.entry_computation_name = _unmarked(message.entry_computation_name)
        for body in message.computations:
            body.name = _unmarked(body.name)
            for op in body.instructions:
                op.name = _unmarked(op.name)


# Names outside of quotes.
_ANY_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|%([\w.\-]+)')


def _marked(name: str) -> str:
    return f"{name}_as_written"


def _unmarked(name: str) -> str:
    return name.partition("_as_written")[0]


def _parse(text: str) -> _Text:
    parsed = _Text()
    body: _Body | None = None
    for line in text.split("\n"):
        if body is None:
            if header := _HEADER.match(line):
                body = parsed.computations[header["name"]] = _Body(line)
            else:
                parsed.head.append(line)
        elif line.startswith("}"):
            body = None
        elif match := _LINE.match(line):
            body.lines[match["name"]] = line
    names = set[str]()
    bodies = sorted(
        parsed.computations.items(), key=lambda item: not item[1].first_line.startswith("ENTRY")
    )
    for name, body in bodies:
        body.unique = {op: f"{op}.{name}" if op in names else op for op in body.lines}
        names.update(body.lines, body.unique.values())
    return parsed


def _names(line: str) -> list[str]:
    return [first or second for first, second in _NAME.findall(line)]


def _restore_frames(message: Any, parsed: _Text) -> None:
    """What XLA prints of stack frames, and does not parse."""
    tables = dict(_TABLE.findall("\n".join(parsed.head)))
    index = message.stack_frame_index
    index.file_names.extend(_FILE.findall(tables.get("FileNames", "")))
    for file, number in _LOCATION.findall(tables.get("FileLocations", "")):
        index.file_locations.add(file_name_id=int(file), line=int(number))
    for location, parent in _STACK_FRAME.findall(tables.get("StackFrames", "")):
        # XLA prints the number after that of the frame around it, 1 if there is none.
        index.stack_frames.add(file_location_id=int(location), parent_frame_id=int(parent or 1) - 1)
    ops = {op.name: op for body in message.computations for op in body.instructions}
    for body in parsed.computations.values():
        for name, line in body.lines.items():
            if frame := _FRAME.search(line):
                ops[body.unique[name]].metadata.stack_frame_id = int(frame[1])


def expand_async_pairs(text: str) -> str:
    """The text with a computation for every asynchronous pair that is printed without one.

    XLA:GPU prints an `async-start` of an all-reduce as an `all-reduce-start` with the attributes of
    both, and reads this as the older instruction of that name, which has another shape.
    """
    lines: list[str] = []
    starts: set[str] = set()
    head = 0  # of the computation that the line is in
    for line in text.split("\n"):
        if line.startswith(("%", "ENTRY")):
            head = len(lines)
        match = _LINE.match(line)
        if match and match["shape"].startswith("((") and match["opcode"].endswith("-start"):
            if match["opcode"] not in ("async-start", "copy-start"):
                starts.add(match["name"])
                lines[head:head] = [*_computation(match), ""]
                line = _async_start(line, match)
        elif match and match["opcode"].endswith("-done") and _operands(match["rest"])[0] in starts:
            line = line.replace(f" {match['opcode']}(", " async-done(", 1)
        lines.append(line)
    return "\n".join(lines)


def _async_start(line: str, match: re.Match[str]) -> str:
    attributes = [
        f"calls=%{match['name']}.computation",
        *filter(_is_of_pair, _attributes(match["rest"])),
    ]
    before = line[: match.start("opcode")]
    operands = ", ".join(f"%{operand}" for operand in _operands(match["rest"]))
    return f"{before}async-start({operands}), {', '.join(attributes)}"


def _computation(match: re.Match[str]) -> Iterator[str]:
    name = match["name"]
    operands, result, *_ = _split(match["shape"][1:-1])
    shapes = [shape for shape in _split(operands[1:-1]) if shape]
    names = [f"{name}.operand.{number}" for number in range(len(shapes))]
    opcode = match["opcode"].removesuffix("-start")
    call = f"{opcode}({', '.join(f'%{operand}' for operand in names)})"
    attributes = (
        attribute for attribute in _attributes(match["rest"]) if not _is_of_pair(attribute)
    )
    yield f"%{name}.computation {{"
    for number, (operand, shape) in enumerate(zip(names, shapes, strict=True)):
        yield f"  %{operand} = {shape} parameter({number})"
    yield f"  ROOT %{name}.result = {result} {', '.join([call, *attributes])}"
    yield "}"


def _is_of_pair(attribute: str) -> bool:
    return attribute.startswith(_OF_THE_PAIR) and '"fusion_backend_config"' not in attribute


def _operands(tail: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", tail.partition(")")[0])


def _attributes(tail: str) -> Sequence[str]:
    return [
        attribute for attribute in _split(tail.partition(")")[2].removeprefix(", ")) if attribute
    ]


def _split(text: str) -> Sequence[str]:
    """Split at commas outside of brackets and quotes."""
    parts: list[str] = []
    depth, begin, is_quoted = 0, 0, False
    for position, sign in enumerate(text):
        if sign == '"' and text[position - 1] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (sign in "({[") - (sign in ")}]")
            if sign == "," and not depth:
                parts.append(text[begin:position].strip())
                begin = position + 1
    return [*parts, text[begin:].strip()]
