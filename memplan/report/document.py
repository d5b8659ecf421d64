"""Frozen dataclasses to strict JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

Row = TypeVar("Row")
Pairs = tuple[tuple[str, str], ...]
"""A mapping that can be hashed: ((key, value), ...); a JSON object in a document."""


def to_json(record: Any, schema: str) -> str:
    """The dataclass as a JSON object, a row to a line, whose first entry is `"schema": schema`.

    Raises:
      ValueError: a number is infinite or not a number; names the field.
    """
    return _laid_out({"schema": schema, **_plain(record, "")}, "")


def from_json[Row](record: type[Row], text: str, schema: str) -> Row:
    """The dataclass that `to_json` wrote. Entries that it does not know are passed over.

    Raises:
      ValueError: not JSON, another schema, or an entry is missing or of another type; names the entry.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is not JSON ({error}). The file may be truncated; write it again.") from error
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise ValueError(f"This document has schema {found!r}, expected {schema!r}. Write it again with this memplan.")
    return _build(record, document, "")


def _laid_out(value: Any, indent: str) -> str:
    """JSON with an entry to a line, down to rows: objects in arrays, and arrays of numbers, take a line each."""
    is_object, inner = isinstance(value, dict), indent + "  "
    rows = [entry for entry in (value.values() if is_object else value) if isinstance(entry, (dict, list))]
    if not rows:
        return json.dumps(value, allow_nan=False)
    if is_object:
        parts = [f"{json.dumps(name)}: {_part(entry, inner)}" for name, entry in value.items()]
    else:
        parts = [json.dumps(entry, allow_nan=False) for entry in value]
    opened, closed = "{}" if is_object else "[]"
    return f"{opened}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closed}"


def _part(value: Any, indent: str) -> str:
    return _laid_out(value, indent) if isinstance(value, (dict, list)) else json.dumps(value, allow_nan=False)


@functools.cache
def _hints(record: type) -> Mapping[str, Any]:
    return typing.get_type_hints(record)


def _plain(value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value):
        hints = _hints(type(value))
        entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            name: dict(entry) if hints[name] == Pairs else _plain(entry, f"{where}.{name}".lstrip("."))
            for name, entry in entries.items()
        }
    if isinstance(value, Mapping):
        return {name: _plain(entry, f"{where}.{name}".lstrip(".")) for name, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which JSON cannot hold. Use None for a figure that is not known.")
    if isinstance(value, numbers.Integral) and not isinstance(value, (bool, int)):
        return int(value)  # numpy's
    return value


def _build[Row](record: type[Row], document: Mapping[str, Any], where: str) -> Row:
    hints = _hints(record)
    entries: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # pyright: ignore[reportArgumentType]
        name = f"{where}.{field.name}".lstrip(".")
        if field.name in document:
            entries[field.name] = _read(hints[field.name], document[field.name], name)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"The document has no entry {name!r}. It was cut or edited; write it again.")
    return record(**entries)


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotation `kind` says: a dataclass, `tuple[X, ...]`, `Pairs`, a union with None, or a scalar."""
    if kind == Pairs and isinstance(value, dict):
        return tuple((str(key), str(entry)) for key, entry in value.items())
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        item = typing.get_args(kind)[0]
        return tuple(_read(item, entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _build(typing.cast(type, kind), value, where)
    if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
        return value
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if len(options) > 1 and isinstance(value, dict):
        return next(_read(option, value, where) for option in options if dataclasses.is_dataclass(option))
    if type(value) in options or (value is None and types.NoneType in options):
        return value
    if type(value) is int and float in options:
        return float(value)
    raise ValueError(f"Entry {where!r} of the document is {value!r}, which is not {_spelled(kind)}.")


def _spelled(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
