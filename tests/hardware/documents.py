"""Documents with a changed entry."""

import json
from typing import Any


def edited(text: str, where: str, value: Any) -> str:
    """The document with one entry, `a.1.b`, replaced or added, or taken out for None."""
    document = json.loads(text)
    *path, last = where.split(".")
    entry = document
    for name in path:
        entry = entry[int(name)] if isinstance(entry, list) else entry[name]
    if value is None:
        del entry[last]
    else:
        entry[last] = value
    return json.dumps(document)
