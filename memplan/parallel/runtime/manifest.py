"""What belongs to a checkpoint: every leaf with its type, every file with its sum. Written last, so it is complete."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError
from memplan.io import decode, write_atomic
from memplan.program import compat

NAME = "memplan.json"
CHUNK_BYTES = 2**24
SHOWN = 5  # differences in a message


@dataclass(frozen=True)
class Manifest:
    """Names of leaves to `dtype[shape]`, in the order in which they are numbered; files to bytes and CRC-32."""

    leaves: Mapping[str, str]
    files: Mapping[str, tuple[int, int]]


def write(folder: Path, leaves: Mapping[str, Any]) -> None:
    """For all files that are in the folder now."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {str(path.relative_to(folder)): file_sum(path) for path in files if path.name != NAME}
    write_atomic(folder / NAME, json.dumps({"leaves": _described(leaves), "files": sums}))


def read(folder: Path) -> Manifest:
    """An OSError or a ValueError where it is damaged."""
    return decode(Manifest, json.loads((folder / NAME).read_text(encoding="utf-8")), complete=True)


def check_same(saved: Manifest, wanted: Mapping[str, Any], folder: Path) -> None:
    """A MemplanError with the leaves that were not saved so."""
    before, asked = saved.leaves, _described(wanted)
    differing = [
        f"state{name}: {before.get(name, 'not saved')}, wanted {asked.get(name, 'not')}"
        for name in {**before, **asked}
        if before.get(name) != asked.get(name)
    ]
    if differing:
        more = f", and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise MemplanError(
            f"{folder} holds another state than is wanted: {'; '.join(differing[:SHOWN])}{more}. Was it saved with "
            "another model or optimizer? Use those, or another folder."
        )


def file_sum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    nbytes = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            nbytes, checksum = nbytes + len(chunk), zlib.crc32(chunk, checksum)
    return nbytes, checksum


def _described(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{_dtype(leaf)}{list(leaf.shape)}" for name, leaf in leaves.items()}


def _dtype(leaf: Any) -> str:
    """Of a typed key its generator: another one's words mean other numbers."""
    return f"key<{compat.key_impl_of(leaf.dtype)}>" if compat.is_key(leaf) else leaf.dtype.name
