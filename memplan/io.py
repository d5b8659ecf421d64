"""Files that appear whole or not at all, and say how they are written."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
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


def read_json(path: str | os.PathLike[str], form: int) -> dict[str, Any]:
    """The JSON object of a file, without its entry `format`, which says how it is written.

    Raises:
      OSError: there is no such file.
      ValueError: it has no object of this format.
    """
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("it has no entry 'format'")
    if (found := document.pop("format")) != form:
        raise ValueError(f"its format is {found!r}, this memplan reads {form}")
    return document
