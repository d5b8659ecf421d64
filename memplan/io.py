"""Atomic writes of files, and JSON documents of dataclasses."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import numbers
import os
import platform
import sys
import threading
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

# Refuse a larger document. The report of a step of 100,000 buffers takes about 100 MB.
MOST_BYTES = 2**28
_MAX_ENTRIES = 2**24  # of a document: commas and opening brackets
_INTEGER_LIMIT = 2**63  # integers of a document are smaller, so they fit in 64 bits

# Class variable by which the members of a union of dataclasses are told apart in a document.
_TAG = "tag"

_DESCRIPTIONS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    frozenset: "a list",
}


class _Strict(NamedTuple):
    """Rules of `decode` about entries that are missing or unknown."""

    complete: bool  # entries with a default must be there
    exact: bool  # unknown entries are refused


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file in one step, so that no reader sees a part of it. Text is written as UTF-8.

    A pipe or a terminal is written to directly.

    Raises:
      OSError: the folder is missing or not writable; no file is left behind.
    """
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a document.

    Raises:
      OSError: there is no such file.
      ValueError: it is too large, or not text.
    """
    with open(path, "rb") as file:
        return text_of(file.read(MOST_BYTES + 1))


def text_of(data: bytes) -> str:
    """Decode a document from UTF-8.

    Raises:
      ValueError: it is not UTF-8, or has more than `MOST_BYTES`.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"it has more than {MOST_BYTES >> 20} MiB, which no document of memplan has"
        )
    return data.decode()


def parse(text: str) -> Any:
    """Parse a JSON document. This is safe for documents from other people.

    Raises:
      ValueError: it is not JSON, truncated, too large or nested too deeply, or an object has two
        entries with the same name.
    """
    if len(text) > MOST_BYTES or sum(map(text.count, ",[{")) > _MAX_ENTRIES:
        raise ValueError("it has more entries than any document of memplan")
    try:
        document = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text.lower():  # maybe half of a surrogate pair, which UTF-8 cannot encode
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError if two entries have the same name."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        duplicate = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"it has two entries {duplicate!r:.40}")
    return entries


def read_json(path: str | os.PathLike[str], form: int) -> dict[str, Any]:
    """Read the JSON object of a file, without its entry `format`.

    Args:
      form: the version of the format, which the entry `format` must have.

    Raises:
      OSError: there is no such file.
      ValueError: it has no object of this format.
    """
    return parse_json(read_text(path), form)


def parse_json(text: str, form: int) -> dict[str, Any]:
    """Parse the text of such a file; raises ValueError like `read_json`."""
    document = parse(text)
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("it has no entry 'format'")
    actual = document.pop("format")
    if actual != form or type(actual) is not int:
        raise ValueError(f"its format is {actual!r:.40}, but this version of memplan reads {form}")
    return document


def encode(record: Any, where: str = "") -> Any:
    """Convert a dataclass to dicts, lists and scalars that JSON can represent.

    A dataclass with a class variable `tag` gets an entry of that name, by which `decode` tells the
    members of a union apart. Sets become sorted lists, enumerations their values, and numpy's
    integers Python's.

    Args:
      where: path of the record in the document, for errors.

    Raises:
      ValueError: a number is infinite or NaN; names the entry.
    """
    if record is None or isinstance(record, (str, int)):
        return record
    if dataclasses.is_dataclass(record):
        names = [field.name for field, _ in _fields(type(record))]
        entries = {name: encode(getattr(record, name), f"{where}.{name}") for name in names}
        return {_TAG: getattr(record, _TAG), **entries} if hasattr(record, _TAG) else entries
    if isinstance(record, Mapping):
        return {name: encode(entry, f"{where}.{name}") for name, entry in record.items()}
    if isinstance(record, Enum):
        return record.value
    if isinstance(record, frozenset):
        return encode(sorted(record), where)
    if isinstance(record, (tuple, list)):
        return [encode(entry, f"{where}[{number}]") for number, entry in enumerate(record)]
    if isinstance(record, float) and not math.isfinite(record):
        raise ValueError(
            f"{where.lstrip('.')} is {record}, which JSON cannot represent. Use None for an "
            "unknown figure."
        )
    return int(record) if isinstance(record, numbers.Integral) else record


def decode[Record](
    kind: type[Record],
    document: Any,
    *,
    complete: bool = False,
    exact: bool = False,
) -> Record:
    """Convert what `encode` returned back to the dataclass.

    Args:
      complete: entries with a default must be there, too.
      exact: refuse unknown entries; they are ignored otherwise.

    Raises:
      ValueError: an entry is missing, has another type, is not finite, or is refused by its
        dataclass; names the entry.
    """
    return _decode(kind, document, "", _Strict(complete, exact))


def scalars(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each scalar in a document."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from scalars(entry, _join(where, name))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from scalars(entry, f"{where}[{number}]")
    else:
        yield where, value


def _decode(hint: Any, value: Any, where: str, strict: _Strict) -> Any:
    """Convert `value` to the annotation `hint`.

    It is a dataclass, tuple, frozenset, mapping, enumeration, literal or scalar, or one of these
    or None, or a union of dataclasses with tags.
    """
    annotation = _annotation(hint)
    kind, optional, origin, arguments = annotation
    if kind is int is type(value) and abs(value) >= _INTEGER_LIMIT:
        raise ValueError(f"its {where!r} is a number of more than 64 bits")
    if (value is None and optional) or (type(value) is kind and kind is not float):
        return value
    if origin is types.UnionType and isinstance(value, dict):
        kind = _member(arguments, value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _dataclass(typing.cast(type, kind), value, where, strict)
    if origin is Mapping and isinstance(value, dict):
        return {
            name: _decode(arguments[1], entry, _join(where, name), strict)
            for name, entry in value.items()
        }
    if origin in (tuple, frozenset) and isinstance(value, list):
        item_hints = annotation.hints_of_items(len(value))
        if len(item_hints) == len(value):
            pairs = enumerate(zip(item_hints, value, strict=True))
            return origin(
                _decode(item_hint, item, f"{where}[{number}]", strict)
                for number, (item_hint, item) in pairs
            )
    if origin is typing.Literal and value in arguments:
        return value
    if origin is Enum and value in arguments:
        return typing.cast(Any, kind)(value)
    number: Any = value
    # NaN fails this comparison.
    if kind is float and type(value) in (float, int) and abs(number) <= sys.float_info.max:
        return float(number)
    raise ValueError(f"its {where!r} is {value!r:.40}, not {annotation.description}")


def _member(members: tuple[Any, ...], document: dict[str, Any], where: str) -> Any:
    """The dataclass of a union that an object's tag names; without a tag, the one that has none."""
    by_tag = {getattr(member, _TAG, None): member for member in members}
    tag = document.get(_TAG)
    if not isinstance(tag, str | None) or tag not in by_tag:
        choices = ", ".join(filter(None, by_tag))
        raise ValueError(f"its {_join(where, _TAG)!r} is {tag!r:.40}, not one of {choices}")
    return by_tag[tag]


def _dataclass(kind: type, document: dict[str, Any], where: str, strict: _Strict) -> Any:
    """Convert an object to the dataclass `kind`."""
    entries: dict[str, Any] = {}
    for field, hint in _fields(kind):
        if field.name in document:
            entries[field.name] = _decode(
                hint, document[field.name], _join(where, field.name), strict
            )
        elif strict.complete or field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"it has no entry {_join(where, field.name)!r}")
    if strict.exact:
        unknown = set(document) - {field.name for field, _ in _fields(kind)}
        if hasattr(kind, _TAG):
            unknown.discard(_TAG)
        if unknown:
            raise ValueError(f"it has an unknown entry {_join(where, min(unknown))!r:.80}")
    return kind(**entries)


@functools.cache
def _fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """The fields of a dataclass, with their annotations."""
    hints = typing.get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(kind))


class _Annotation(NamedTuple):
    """The type of an entry."""

    kind: Any  # without None
    optional: bool  # is None allowed, too?
    origin: Any  # of a generic kind; `Enum` for an enumeration, `UnionType` for a union
    arguments: tuple[Any, ...]  # of a generic kind; an enumeration's values, a union's members

    @property
    def description(self) -> str:
        """The type in words, for errors."""
        if self.origin in (typing.Literal, Enum):
            return f"one of {', '.join(map(str, self.arguments))}"
        if self.origin is tuple:
            return "a list" if self.arguments[-1] is ... else f"a list of {len(self.arguments)}"
        return _DESCRIPTIONS.get(self.origin or self.kind, "an object")

    def hints_of_items(self, count: int) -> tuple[Any, ...]:
        """The annotations of a list's items: `count`, or as many as a tuple must have."""
        if self.origin is tuple and self.arguments[-1] is not ...:
            return self.arguments
        return self.arguments[:1] * count


@functools.cache
def _annotation(hint: Any) -> _Annotation:
    """The parts of an annotation that tell how to decode an entry."""
    members = list(typing.get_args(hint)) if isinstance(hint, types.UnionType) else [hint]
    optional = types.NoneType in members
    if optional:
        members.remove(types.NoneType)
    if len(members) > 1:
        return _Annotation(hint, optional, types.UnionType, tuple(members))
    [kind] = members
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Annotation(kind, optional, Enum, tuple(member.value for member in kind))
    return _Annotation(kind, optional, typing.get_origin(kind), typing.get_args(kind))


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def versions(*packages: str) -> tuple[tuple[str, str], ...]:
    """((name, version), ...) of Python and of these packages, as documents record them."""
    return (("python", platform.python_version()), *((name, version_of(name)) for name in packages))


def version_of(package: str) -> str:
    """The installed version of a package; `0+source` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
