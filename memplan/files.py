"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


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
