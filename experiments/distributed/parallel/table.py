"""The README's table, from the results."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.readme import grid, insert

README = Path(__file__).parent / "README.md"
HEAD = ("step", "processes x devices", "with", "off by", "recompilation alone", "allowed", "")


def table(results: Path) -> str:
    document = json.loads(results.read_text())
    lines = []
    for one in document["rows"]:
        verdict = "same" if one["passes"] else "**other numbers**"
        figures = (f"{one[name]:.1e}" for name in ("off", "recompilation", "tolerance"))
        shape = f"{one['processes']} x {one['devices']}"
        lines.append((one["case"], shape, one["options"] or "plain", *figures, verdict))
    told = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"{grid(HEAD, lines)}\n\nAfter {document['steps']} steps; {told}."


def write_table(results: Path) -> None:
    insert(README, table(results))
