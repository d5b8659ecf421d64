"""Compact JSON for pages: rows by column, repeated text once, nine digits of a number.

`assets/packed.js` reads it. Rows of one kind become `{"rows": n, "columns": {name: column}}`; a
column is a list, or `{"of": [text, ...], "at": [number, ...]}`, or such rows again, with null where
`"at"` has -1.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_MIN_ROWS = 16
_DIGITS = 9  # a nanosecond of a second


def dumps(entries: Mapping[str, Any]) -> str:
    """Entries of a result, as `Result.entries` gives them."""
    return json.dumps(_packed(entries), separators=(",", ":"))


def _packed(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {name: _packed(value) for name, value in entry.items()}
    if not isinstance(entry, list):
        return entry
    if len(entry) < _MIN_ROWS or not all(isinstance(row, dict) for row in entry):
        return [_packed(value) for value in entry]
    return _rows(entry)


def _rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "columns": {
            name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())
        },
    }


def _column(column: list[Any]) -> Any:
    if any(isinstance(cell, dict) for cell in column):
        present = [cell for cell in column if cell is not None]
        numbers = iter(range(len(present)))
        return {
            "of": _rows(present),
            "at": [-1 if cell is None else next(numbers) for cell in column],
        }
    if all(isinstance(cell, str) for cell in column):
        numbers = {text: number for number, text in enumerate(dict.fromkeys(column))}
        if 2 * len(numbers) < len(column):
            return {"of": list(numbers), "at": [numbers[text] for text in column]}
        return column
    return [float(f"{cell:.{_DIGITS}g}") if isinstance(cell, float) else cell for cell in column]
