"""The README's table, from the results."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.readme import grid, insert

README = Path(__file__).parent / "README.md"
HEAD = ("link", "sums", "sent by a host, MiB a step", "over the lower bound", "ms a step", "against flat", "last loss")


def table(results: Path) -> str:
    lines = []
    versions: dict[str, str] = {}
    for path in sorted(results.glob("*.json")):
        document = json.loads(path.read_text())
        versions |= document["versions"]
        hosts, flat = document["hosts"], document["ways"]["flat"]
        for way, one in document["ways"].items():
            bound = 2 * (hosts - 1) / hosts * document["gradient_bytes"] / (2 if way == "compressed" else 1)
            over, faster = one["sent_bytes"] / bound, flat["step_s"] / one["step_s"]
            figures = f"{one['sent_bytes'] / 2**20:.2f}", f"{over:.3f}", f"{1e3 * one['step_s']:.0f}", f"{faster:.2f}x"
            lines.append((document["rate"], way, *figures, f"{one['losses'][-1]:.4f}"))
    return f"{grid(HEAD, lines)}\n\n{', '.join(f'{name} {version}' for name, version in versions.items())}"


def write_table(results: Path) -> None:
    insert(README, table(results))
