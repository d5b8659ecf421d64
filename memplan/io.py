"""Files that appear whole or not at all, and dataclasses as JSON has them: written, and read by their annotations."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
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

MOST_BYTES = 2**28
"""Of a document that is read; the report of a step of 100,000 buffers takes about 100 MB."""
_MOST_ENTRIES = 2**24
_MOST_INTEGER = 2**63

_DESCRIPTIONS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", frozenset: "a list"}


class _Strict(NamedTuple):
    """Rules of `decode` for objects besides their types."""

    complete: bool
    exact: bool


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write text as UTF-8, or bytes; an existing file is replaced in one step, a pipe or terminal is written to.

    Raises:
      OSError: the folder is missing or may not be written to; nothing is left behind.
    """
    target = Path(os.path.realpath(path))
    written = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        target.write_bytes(written)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        temporary.write_bytes(written)
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


def text_of(written: bytes) -> str:
    """The text that these bytes are in UTF-8; raises ValueError where they are none, or more than `MOST_BYTES`."""
    if len(written) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB, which no document of memplan has")
    return written.decode()


def parse(text: str) -> Any:
    """What a JSON document says; a stranger's is safe to read.

    Raises:
      ValueError: not JSON, cut short, too large or too deep; or an object has two entries of one name.
    """
    if len(text) > MOST_BYTES or sum(map(text.count, ",[{")) > _MOST_ENTRIES:
        raise ValueError("it has more entries than any document of memplan")
    try:
        found = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text.lower():  # half of a character, which no file can be written with
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has two entries {twice!r:.40}")
    return found


def read_json(path: str | os.PathLike[str], form: int) -> dict[str, Any]:
    """The JSON object of a file, without its entry `format`, which says how it is written.

    Raises:
      OSError: there is no such file.
      ValueError: it has no object of this format.
    """
    return parse_json(read_text(path), form)


def parse_json(text: str, form: int) -> dict[str, Any]:
    """The same of the text of such a file; raises the ValueError."""
    document = parse(text)
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("it has no entry 'format'")
    if (found := document.pop("format")) != form or type(found) is not int:
        raise ValueError(f"its format is {found!r:.40}, but this version of memplan reads {form}")
    return document


def encode(record: Any, where: str = "") -> Any:
    """The dataclass as dicts, lists (of sets sorted ones) and scalars (of enumerations); numpy's integers as Python's.

    Raises:
      ValueError: a number is infinite or not a number; names the entry.
    """
    if record is None or isinstance(record, (str, int)):
        return record
    if dataclasses.is_dataclass(record):
        names = [field.name for field, _ in _fields(type(record))]
        return {name: encode(getattr(record, name), f"{where}.{name}") for name in names}
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
            f"{where.lstrip('.')} is {record}, which JSON cannot represent. Use None for an unknown figure."
        )
    return int(record) if isinstance(record, numbers.Integral) else record


def decode[Record](kind: type[Record], document: Any, *, complete: bool = False, exact: bool = False) -> Record:
    """The dataclass that `encode` was given.

    Args:
      complete: entries with a default must be there too.
      exact: entries that are not known are refused; they are passed over otherwise.

    Raises:
      ValueError: an entry is missing, of another type, not finite or refused by its dataclass; names the entry.
    """
    return _decode(kind, document, "", _Strict(complete, exact))


def scalars(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The path and value of each scalar in a document."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from scalars(entry, _join(where, name))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from scalars(entry, f"{where}[{number}]")
    else:
        yield where, value


def _decode(kind: Any, value: Any, where: str, strict: _Strict) -> Any:
    """`value` as the annotation `kind` says: a dataclass, tuple, set, mapping, literal or scalar, or one or None."""
    kind, optional, origin, inner = _annotation(kind)
    if kind is int is type(value) and abs(value) >= _MOST_INTEGER:
        raise ValueError(f"its {where!r} is a number of more than 64 bits")
    if (value is None and optional) or (type(value) is kind and kind is not float):
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _record(typing.cast(type, kind), value, where, strict)
    if origin is tuple and isinstance(value, list) and (inner[-1] is ... or len(inner) == len(value)):
        kinds = inner if inner[-1] is not ... else itertools.repeat(inner[0])
        pairs = enumerate(zip(kinds, value, strict=False))
        return tuple(_decode(one, entry, f"{where}[{number}]", strict) for number, (one, entry) in pairs)
    if origin is frozenset and isinstance(value, list):
        return frozenset(_decode(inner[0], entry, f"{where}[{number}]", strict) for number, entry in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {name: _decode(inner[1], entry, _join(where, name), strict) for name, entry in value.items()}
    if origin is typing.Literal and value in inner:
        return value
    if origin is Enum and value in inner:
        return typing.cast(Any, kind)(value)
    number: Any = value
    if kind is float and type(value) in (float, int) and abs(number) <= sys.float_info.max:  # nan is not
        return float(number)
    raise ValueError(f"its {where!r} is {value!r:.40}, not {_description(kind, origin, inner)}")


def _record(kind: type, document: dict[str, Any], where: str, strict: _Strict) -> Any:
    entries: dict[str, Any] = {}
    for field, hint in _fields(kind):
        if field.name in document:
            entries[field.name] = _decode(hint, document[field.name], _join(where, field.name), strict)
        elif strict.complete or field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"it has no entry {_join(where, field.name)!r}")
    if strict.exact and (unknown := set(document) - {field.name for field, _ in _fields(kind)}):
        raise ValueError(f"it has an unknown entry {_join(where, min(unknown))!r:.80}")
    return kind(**entries)


@functools.cache
def _fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """With their annotations."""
    hints = typing.get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(kind))


@functools.cache
def _annotation(kind: Any) -> tuple[Any, bool, Any, tuple[Any, ...]]:
    """The annotation without None, if it may be None, its origin and arguments; of an enumeration, its values."""
    kind, *others = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind, types.NoneType in others, Enum, tuple(member.value for member in kind)
    return kind, types.NoneType in others, typing.get_origin(kind), typing.get_args(kind)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _description(kind: Any, origin: Any, inner: tuple[Any, ...]) -> str:
    if origin in (typing.Literal, Enum):
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return "a list" if inner[-1] is ... else f"a list of {len(inner)}"
    return _DESCRIPTIONS.get(origin or kind, "an object")


def versions(*packages: str) -> tuple[tuple[str, str], ...]:
    """((name, version), ...) of Python and of these packages: what a document says of its making."""
    return (("python", platform.python_version()), *((name, version_of(name)) for name in packages))


def version_of(package: str) -> str:
    """The installed version; `0+source` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
