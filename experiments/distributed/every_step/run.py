"""Is every step of many processes right? `python -m experiments.distributed.every_step.run` (about ten minutes)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.distributed.every_step.worker import CASES
from experiments.readme import grid, measure_and_tell
from memplan.outcome.report import versions

README = Path(__file__).parent / "README.md"
STEPS = 200
MESHES = {"3x4": (3, 4), "2x2x2": (4, 2), "5x1": (5, 1), "6x1": (6, 1), "7x1": (7, 1)}  # processes, devices of each


def launched(
    mesh: str, steps: int, cases: Sequence[str] = tuple(CASES), timeout_s: float = 900
) -> list[dict[str, Any]]:
    """What every rank found of every case."""
    processes, devices = MESHES[mesh]
    launch = [sys.executable, "-c", "from memplan.cli import main; main()", "launch", "-n", str(processes)]
    worker = ["--devices", str(devices), "--", sys.executable, "-m", "experiments.distributed.every_step.worker"]
    words = ["--mesh", mesh, "--steps", str(steps), "--cases", *cases]
    command = [*launch, *worker, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{mesh} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    told = (line.partition("] ")[2] for line in done.stdout.splitlines())
    return [json.loads(line) for line in told if line.startswith("{")]


def measure(mesh: str) -> str:
    rows = []
    found = launched(mesh, STEPS)
    for case in CASES:
        ranks = [one for one in found if one["case"] == case]
        worst = max(one["worst"] for one in ranks)
        rows.append({"case": case, "ranks": len(ranks), "wrong": sum(one["wrong"] for one in ranks), "worst": worst})
    return json.dumps({"mesh": mesh, "steps": STEPS, "versions": dict(versions()), "rows": rows}, indent=1)


def table() -> str:
    head, lines, told = (
        ("mesh", "processes", "step", "steps", "wrong on any rank", "worst, of what is allowed"),
        [],
        set(),
    )
    for mesh in MESHES:
        path = README.parent / "results" / f"{mesh}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        told.add(", ".join(f"{name} {version}" for name, version in document["versions"].items()))
        for one in document["rows"]:
            shape = mesh, one["ranks"], one["case"], document["steps"]
            lines.append((*shape, one["wrong"], f"{one['worst']:.1%}"))
    return f"{grid(head, lines)}\n\n{'; '.join(sorted(told))}"


if __name__ == "__main__":
    measure_and_tell(__doc__, MESHES, measure, README, table)
