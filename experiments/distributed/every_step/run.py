"""Is every step of many processes right? Takes about an hour.

python -m experiments.distributed.every_step.run
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.distributed.every_step.worker import LAYERS, NETWORKS
from experiments.readme import command_line, grid
from memplan.results.report import versions

README = Path(__file__).parent / "README.md"
# Processes, and devices of each.
MESHES = {"3x4": (3, 4), "2x2x2": (4, 2), "5x1": (5, 1), "6x1": (6, 1), "7x1": (7, 1)}
# For networks.
FEW = {
    f"{n}x{count // n}": (n, count // n) for count in (1, 2, 4, 8) for n in (1, 2, 4) if n <= count
}


def launched(
    mesh: str, steps: int, cases: Sequence[str], timeout_s: float = 900
) -> list[dict[str, Any]]:
    """The reports of all ranks on all cases."""
    processes, devices = {**MESHES, **FEW}[mesh]
    launch = [
        sys.executable,
        "-c",
        "from memplan.cli import main; main()",
        "launch",
        "-n",
        str(processes),
    ]
    worker = [
        "--devices",
        str(devices),
        "--",
        sys.executable,
        "-m",
        "experiments.distributed.every_step.worker",
    ]
    command = [*launch, *worker, "--mesh", mesh, "--steps", str(steps), "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{mesh} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    lines = (line.partition("] ")[2] for line in done.stdout.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def measure(mesh: str) -> str:
    cases, steps = (LAYERS, 200) if mesh in MESHES else (NETWORKS, 20)
    rows, reports = [], launched(mesh, steps, [*cases])
    for case in cases:
        ranks = [report for report in reports if report["case"] == case]
        worst = max(report["worst"] for report in ranks)
        rows.append(
            {
                "case": case,
                "ranks": len(ranks),
                "wrong": sum(report["wrong"] for report in ranks),
                "worst": worst,
            }
        )
    return json.dumps(
        {"mesh": mesh, "steps": steps, "versions": dict(versions()), "rows": rows}, indent=1
    )


def table() -> str:
    head = ("mesh", "processes", "step", "steps", "wrong on any rank", "worst, of what is allowed")
    lines, releases = [], set()
    for path in (README.parent / "results" / f"{mesh}.json" for mesh in (*MESHES, *FEW)):
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        releases.add(
            ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        )
        for row in document["rows"]:
            shape = document["mesh"], row["ranks"], row["case"], document["steps"]
            lines.append((*shape, row["wrong"], f"{row['worst']:.1%}"))
    return f"{grid(head, lines)}\n\n{'; '.join(sorted(releases))}"


if __name__ == "__main__":
    command_line(__doc__, {**MESHES, **FEW}, measure, README, table)
