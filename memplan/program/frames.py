"""Stack frames that HLO text carries -> the line of the user's code behind every instruction."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memplan.program import compat

_FILE = re.compile(r'^(?P<id>\d+) "(?P<name>.*)"$')
_LOCATION = re.compile(r"^(?P<id>\d+) \{file_name_id=(?P<file>\d+) .*?\bline=(?P<line>\d+)\b")
_FRAME = re.compile(r"^(?P<id>\d+) \{file_location_id=(?P<location>\d+)(?: parent_frame_id=(?P<parent>\d+))?")
_MADE = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = .*\bstack_frame_id=(?P<frame>\d+)", re.MULTILINE)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def sources(hlo: str) -> dict[str, str]:
    """Instruction name -> `file:line`, of those that tell; libraries are passed over like in `compat.source_of`."""
    tables = _tables(hlo)
    files = {match["id"]: match["name"] for line in tables["FileNames"] if (match := _FILE.match(line))}
    where = {
        match["id"]: (files.get(match["file"], ""), match["line"])
        for line in tables["FileLocations"]
        if (match := _LOCATION.match(line))
    }
    frames = {
        int(match["id"]): (where.get(match["location"], ("", "")), int(match["parent"] or 0))
        for line in tables["StackFrames"]
        if (match := _FRAME.match(line))
    }
    lines = {frame: _line(frame, frames) for frame in frames}
    found = ((match["name"], lines.get(int(match["frame"]), "")) for match in _MADE.finditer(hlo))
    return {name: line for name, line in found if line}


def _line(frame: int, frames: dict[int, tuple[tuple[str, str], int]]) -> str:
    """The innermost frame that is not a library's, else the innermost one."""
    way = list(_outward(frame, frames))
    own = [(file, line) for file, line in way if not compat.is_installed(file)]
    file, line = next(iter(own or way))
    return f"{compat.relative(file)}:{line}" if file else ""


def _outward(frame: int, frames: dict[int, tuple[tuple[str, str], int]]) -> Iterator[tuple[str, str]]:
    """The frame and those around it. XLA writes the number after that of the frame around, 1 where there is none."""
    seen: set[int] = set()
    while frame in frames and frame not in seen:
        seen.add(frame)
        place, parent = frames[frame]
        yield place
        frame = parent - 1


def _tables(hlo: str) -> dict[str, list[str]]:
    """The lines of the tables in front of the computations."""
    tables: dict[str, list[str]] = {name: [] for name in _TABLES}
    current: list[str] | None = None
    for line in hlo.splitlines():
        if line in tables:
            current = tables[line]
        elif line.startswith(("%", "ENTRY ")):
            break
        elif current is not None:
            current.append(line)
    return tables
