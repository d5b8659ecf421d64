"""JSON of a page, smaller than that of files: rows by column, repeated text once, nine digits of a number.

What `assets/packed.js` reads. Rows of one kind become `{"rows": n, "columns": {name: column}}`; a column is a list, or
`{"of": [text, ...], "at": [number, ...]}`, or such rows again, with null where `"at"` has -1.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_LEAST_ROWS = 16
_DIGITS = 9  # of seconds: a nanosecond of a second


def dumps(entries: Mapping[str, Any]) -> str:
    """Entries of a result, as `Result.entries` gives them."""
    return json.dumps(_packed(entries), separators=(",", ":"))


def _packed(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {name: _packed(one) for name, one in entry.items()}
    if not isinstance(entry, list):
        return entry
    if len(entry) < _LEAST_ROWS or not all(isinstance(row, dict) for row in entry):
        return [_packed(one) for one in entry]
    return _rows(entry)


def _rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "columns": {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())},
    }


def _column(column: list[Any]) -> Any:
    if any(isinstance(one, dict) for one in column):
        present = [one for one in column if one is not None]
        numbers = iter(range(len(present)))
        return {"of": _rows(present), "at": [-1 if one is None else next(numbers) for one in column]}
    if all(isinstance(one, str) for one in column):
        known = {text: number for number, text in enumerate(dict.fromkeys(column))}
        if 2 * len(known) < len(column):
            return {"of": list(known), "at": [known[text] for text in column]}
        return column
    return [float(f"{one:.{_DIGITS}g}") if isinstance(one, float) else one for one in column]
