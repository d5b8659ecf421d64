"""Modules that tests write as text: XLA's own parser has to accept them."""

import re
from collections.abc import Iterator

from memplan.program import compat
from memplan.xla import module
from memplan.xla.async_pairs import expand_async_pairs

# The shapes in a computation's first line follow from its parameters and its root, and may be left out.
_SIGNATURE = re.compile(r"^((?:ENTRY )?%[\w.\-]+) \(.*\{$")
_NAME = re.compile(r"%([\w.\-]+)")


def read_module(text: str, reuse_parse_of: module.Module | None = None, scheduled: bool = True) -> module.Module:
    """The module of a text, which may say anything in the signatures of computations, and put a reader first."""
    read = module.read_module(text, reuse_parse_of, scheduled)
    compat.module_proto("\n".join(_parsable(expand_async_pairs(text))))
    return read


def _parsable(text: str) -> Iterator[str]:
    """Lines without signatures, each behind what it reads."""
    body: dict[str, str] | None = None
    for line in text.split("\n"):
        if line.startswith("}") and body is not None:
            yield from _operands_first(body)
            body = None
        if body is not None and " = " in line:
            body[_NAME.findall(line)[0]] = line
        elif signature := _SIGNATURE.match(line):
            yield f"{signature[1]} {{"
            body = {}
        else:
            yield line


def _operands_first(body: dict[str, str]) -> Iterator[str]:
    written = set[str]()

    def write(name: str) -> Iterator[str]:
        if name in body and name not in written:
            written.add(name)
            for operand in _NAME.findall(body[name])[1:]:
                yield from write(operand)
            yield body[name]

    for name in body:
        yield from write(name)
