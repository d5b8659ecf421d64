"""Thunks of a compiled program, as XLA:GPU dumps them: what its runtime is handed, without a GPU.

Compile with `compiler_options=dump_options(tmp_path)`, then read `dumped_thunks(tmp_path)`. Two lines of a dump:

    006: kAsyncStart   [prev=005 (1) | next=010 (3)] stream=memcpy_h2d_stream, async_id=6
        007: kCustomKernel [source | sink] wrapped_dynamic_slice grid: [2048, 1, 1] ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_THUNK = re.compile(r"( *)(\d+): (k\w+) +\[.*?\](?!\S) ?(.*)")
_LABEL = re.compile(r" *([\w ]+):$")
_STREAM = re.compile(r"stream=([^,\s]+)")


@dataclass
class Thunk:
    """One thunk, with those inside of it.

    Attributes:
      kind: for example `kCustomKernel`, `kCopy`, `kConvolution`, `kAsyncStart`, `kWhile`, `kCommandBuffer`.
      text: what XLA says of it; a kernel's begins with its name.
      part: of a loop or conditional, in which it stands: `condition`, `body`; '' elsewhere.
      inside: what an asynchronous start, loop, CUDA graph or dynamic slice holds, in order.
    """

    kind: str
    text: str
    part: str = ""
    inside: list[Thunk] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of a kernel."""
        return self.text.split(" ", 1)[0]

    @property
    def stream(self) -> str:
        """Of an asynchronous start; '' of others, which run on the main stream."""
        match = _STREAM.search(self.text)
        return match[1] if match else ""

    @property
    def walk(self) -> Iterator[Thunk]:
        """Itself and all inside of it."""
        yield self
        for child in self.inside:
            yield from child.walk

    def has(self, kind: str) -> bool:
        return any(thunk.kind == kind for thunk in self.walk)


def read_thunks(text: str) -> list[Thunk]:
    """The thunks of a dump `*.thunk_sequence.txt` or `*_after_thunk_passes.txt`, in order."""
    root, label = Thunk("", ""), ""
    path = [(-1, root)]  # those that the line may stand in, with the spaces before each
    for line in text.splitlines():
        if match := _LABEL.fullmatch(line):
            label = match[1]
        elif match := _THUNK.fullmatch(line.rstrip()):
            indent = len(match[1])
            while path[-1][0] >= indent:
                path.pop()
            outer = path[-1][1]
            part = label or (outer.inside[-1].part if outer.inside else "")
            thunk, label = Thunk(match[3], match[4], part), ""
            outer.inside.append(thunk)
            path.append((indent, thunk))
        elif line.strip():
            raise ValueError(f"no thunk: {line}")
    return root.inside


def dump_options(folder: Path) -> dict[str, Any]:
    """Compiler options with which XLA writes thunks into a folder."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def dumped_thunks(folder: Path, module: str = "", after_passes: bool = False) -> list[Thunk]:
    """Thunks of the last program compiled into a folder whose name has `module` in it.

    Args:
      after_passes: with CUDA graphs (`kCommandBuffer`), as they run; else as they were emitted. XLA dumps the first
        only where they differ.
    """
    ends = ["thunk_sequence_after_thunk_passes.txt"] * after_passes + ["thunk_sequence.txt"]
    # by time: XLA numbers modules with four digits, and a whole suite has more of them
    latest = (
        sorted(folder.glob(f"*.{end}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for end in ends
    )
    return read_thunks(
        next(path for files in latest for path in files if module in path.name).read_text()
    )


def loops(thunks: list[Thunk]) -> list[Thunk]:
    """All loops, inner ones among them."""
    return [loop for thunk in thunks for loop in thunk.walk if loop.kind == "kWhile"]
