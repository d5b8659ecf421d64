"""JSON of results: the schema first, one line per entry and per row."""

import json
from collections.abc import Mapping
from typing import Any

from memplan import io


def write(entries: Mapping[str, Any], schema: str) -> str:
    """A JSON object whose first entry is `"schema": schema`."""
    return _layout({"schema": schema, **entries}, "")


def read(text: str, schema: str) -> dict[str, Any]:
    """Read the entries that `write` wrote.

    Raises:
      ValueError: not JSON, or another schema.
    """
    try:
        document = io.parse(text)
    except ValueError as error:
        raise ValueError(
            f"This is not JSON ({error}). The file may be truncated; write it again."
        ) from error
    written = document.get("schema") if isinstance(document, dict) else None
    if written != schema:
        raise ValueError(
            f"This document has schema {written!r:.40}, not {schema!r}. Write it again with this "
            "version of memplan."
        )
    return document


def _layout(value: Any, indent: str) -> str:
    """JSON with one line per entry; objects in arrays and arrays of numbers take one line each."""
    entries = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(entries, list) or not any(
        isinstance(entry, (dict, list)) for entry in entries
    ):
        return json.dumps(value)
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {_layout(entry, inner)}" for name, entry in value.items()]
    else:
        lines = [json.dumps(entry) for entry in entries]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"
