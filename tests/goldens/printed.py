"""XLA's print of a module -> lines that do not depend on ids or on the order of computations.

It shares no code with `memplan.xla`, whose reading of modules the goldens hold.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = "
    r"(?P<shape>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_NAME = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"/\*index=\d+\*/")
_METADATA = re.compile(r',? ?(?:\bmetadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}|\bstack_frame_id=\d+)')
_OF_THE_CALL = re.compile(r'fingerprint_before_lhs="[^"]*",?|entry_computation_layout=.*?\}(?=,|$)')
_BEFORE = re.compile(r",? ?control-predecessors=\{([^}]*)\}")
_QUOTED_OR_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|%[\w.\-]+')
# What these call runs instruction by instruction; plans name what is in it.
_SCHEDULED = frozenset({"call", "conditional", "while"})


@dataclass(frozen=True)
class Line:
    """An instruction as it is printed.

    Attributes:
      before: names of its control predecessors, sorted.
      attributes: what follows the operands, without metadata; names of computations in it.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    before: tuple[str, ...]
    attributes: str
    is_root: bool


@dataclass(frozen=True)
class Print:
    """A module as it is printed: its first line, and its computations by name."""

    head: str
    computations: Mapping[str, Sequence[Line]]
    entry: str

    def lines(self) -> Iterator[str]:
        """All of it, each computation that runs instruction by instruction before its caller."""
        yield self.head
        yield from self._scheduled(self.entry, set())

    @cached_property
    def _digests(self) -> dict[tuple[str, bool], str]:
        return {}

    def _scheduled(self, name: str, printed: set[str]) -> Iterator[str]:
        """In the order of the schedule, by the names of instructions."""
        for line in self.computations[name]:
            for called in self._called(line) if line.opcode in _SCHEDULED else ():
                if called not in printed:
                    printed.add(called)
                    yield from self._scheduled(called, printed)
        yield "{"
        for line in self.computations[name]:
            yield self._text(line, f"%{line.name}", lambda operand: f"%{operand}")
        yield "}"

    def _text(self, line: Line, name: str, named: Callable[[str], str]) -> str:
        """One instruction, the computations that it calls by their digests."""
        by_names = line.opcode in _SCHEDULED

        def digest(match: re.Match[str]) -> str:
            called = match[0].removeprefix("%")
            is_computation = match[0].startswith("%") and called in self.computations
            return self._digest(called, by_names) if is_computation else match[0]

        operands = ", ".join(map(named, line.operands))
        before = " ".join(sorted(map(named, line.before)))
        root = "ROOT " if line.is_root else ""
        attributes = _QUOTED_OR_NAME.sub(digest, line.attributes)
        return f"{root}{name} = {line.shape} {line.opcode}({operands}) {attributes} [{before}]"

    def _called(self, line: Line) -> list[str]:
        names = [match[0] for match in _QUOTED_OR_NAME.finditer(line.attributes)]
        bare = [name.removeprefix("%") for name in names if name.startswith("%")]
        return [name for name in bare if name in self.computations]

    def _digest(self, name: str, by_names: bool) -> str:
        key = name, by_names
        if key not in self._digests:
            text = "\n".join(self._scheduled(name, set()) if by_names else self._nameless(name))
            self._digests[key] = f"<{hashlib.sha256(text.encode()).hexdigest()[:16]}>"
        return self._digests[key]

    def _nameless(self, name: str) -> Iterator[str]:
        """Operands before their readers, by their positions in this order."""
        lines = {line.name: line for line in self.computations[name]}
        root = next(line.name for line in lines.values() if line.is_root)
        numbers: dict[str, int] = {}
        for start in (root, *lines):
            waiting = [start]
            while waiting:
                line = lines[waiting[-1]]
                missing = [
                    operand for operand in (*line.operands, *line.before) if operand not in numbers
                ]
                if missing:
                    waiting.append(missing[0])
                else:
                    numbers.setdefault(waiting.pop(), len(numbers))
        for position, own in enumerate(numbers):
            yield self._text(lines[own], f"#{position}", lambda operand: f"#{numbers[operand]}")


def read_print(text: str) -> Print:
    """The print of a module."""
    head, *lines = text.split("\n")
    computations: dict[str, list[Line]] = {}
    entry = ""
    current: list[Line] | None = None
    for line in lines:
        if current is None:
            if header := _HEADER.match(line):
                current = computations[header["name"]] = []
                entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif line.strip():
            current.append(_read_line(line))
    return Print(_OF_THE_CALL.sub("", head), computations, entry)


def _read_line(line: str) -> Line:
    match = _INSTRUCTION.match(_INDEX.sub("", line))
    assert match, f"no instruction: {line:.200}"
    inside, attributes = _closed(match["rest"])
    if match["opcode"] in ("parameter", "constant"):
        operands, attributes = (), f"({inside}){attributes}"
    else:
        operands = tuple(_NAME.findall(inside))
    attributes = _METADATA.sub("", attributes)
    predecessors = _BEFORE.search(attributes)
    before = tuple(_NAME.findall(predecessors[1])) if predecessors else ()
    attributes = _BEFORE.sub("", attributes).strip(" ,")
    return Line(
        match["name"],
        _INDEX.sub("", match["shape"]),
        match["opcode"],
        operands,
        tuple(sorted(before)),
        attributes,
        bool(match["root"]),
    )


def _closed(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes, and what stands after it."""
    depth = 1
    quoted = False
    for at, sign in enumerate(text):
        if sign == '"' and text[at - 1 : at] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (sign == "(") - (sign == ")")
            if not depth:
                return text[:at], text[at + 1 :]
    raise AssertionError(f"never closed: {text:.200}")


def digest_of(text: str) -> str:
    """Of XLA's print of a module."""
    lines = "\n".join(read_print(text).lines())
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def nameless_digest_of(text: str) -> str:
    """Of the print of a module without a schedule: what its entry computes, whatever the names."""
    module = read_print(text)
    return module._digest(module.entry, by_names=False).strip("<>")
