"""Runs every case and writes `results/*.json` and the table in README.md.

    python -m experiments.planners.table FOLDER [--only NAME ...] [--force]

FOLDER holds the published graphs. Cases that have a result are skipped.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.planners.graphs import random_layered
from experiments.planners.run import plan
from experiments.planners.validate import measure
from experiments.readme import insert
from memplan.io import write_atomic

HERE = Path(__file__).parent
# Name, ratio, seconds allowed, and the goal: percent and seconds.
CASES: tuple[tuple[str, float, float, str], ...] = (
    ("random_layered_n100", 0.9, 60, "0.79 proven, 20 s"),
    ("random_layered_n100", 0.8, 120, "2.30 proven, 20 s"),
    ("random_layered_n250", 0.9, 60, "0.90, 60 s"), ("random_layered_n250", 0.8, 120, "4.9, 120 s"),
    ("resnet50_b256_train", 0.9, 60, "0.11, 60 s"), ("resnet50_b256_train", 0.8, 60, "0.30, 60 s"),
    ("fcn8_vgg_b32_train", 0.9, 60, "0.03, 60 s"), ("fcn8_vgg_b32_train", 0.8, 60, "0.14, 60 s"),
    ("layered_1000_1", 0.9, 60, "0.9, 300 s"), ("layered_1000_1", 0.8, 120, "4.5, 300 s"),
    ("layered_1000_0", 0.9, 120, "0.9, 300 s"), ("layered_1000_0", 0.8, 240, "4.5, 300 s"),
    ("layered_10000_0", 0.8, 30, "a plan, 30 s"), ("layered_10000_0", 0.8, 120, "-"),
    ("layered_10000_0", 0.9, 30, "-"),
)  # fmt: skip


def measured(folder: Path, name: str, ratio: float, seconds: float) -> dict[str, Any]:
    """Plan and judge one case; includes the machine it ran on."""
    with tempfile.TemporaryDirectory() as temporary:
        path = folder / f"{name}.json"
        if name.startswith("layered"):
            _, count, seed = name.split("_")
            path = Path(temporary) / f"{name}.json"
            path.write_text(json.dumps(random_layered(int(count), int(seed))))
        cpu = time.process_time()
        result = plan(path, ratio, seconds)
        result["cpu_seconds"] = round(time.process_time() - cpu, 1)
        if "order" in result:
            verdict = measure(json.loads(path.read_text()), result["order"])
            right = (verdict.peak, verdict.duration) == (result["peak"], result["duration"])
            result["judged"] = right and verdict.peak <= result["budget"]
            result["recomputed"] = len(result.pop("order")) - len(verdict.first)
    return result | {
        "allowed_s": seconds, "load": round(os.getloadavg()[0], 1), "cores": os.cpu_count(),
        "machine": platform.machine(), "ortools": version("ortools"),
        "python": platform.python_version(),
    }  # fmt: skip


def table() -> str:
    """One row per case that has a result."""
    head = (
        "graph",
        "budget",
        "asked for",
        "percent more",
        "lower bound",
        "status",
        "s",
        "CPU s",
        "load",
        "judged",
    )
    rows = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, ratio, seconds, goal in CASES:
        path = _file(name, ratio, seconds)
        if path.exists():
            r = json.loads(path.read_text())
            percent = f"{r['tdi_percent']:.3f}" if "tdi_percent" in r else "none"
            cells = name, ratio, goal, percent, f"{r['lower_bound_percent']:.3f}", r["status"]
            times = r["seconds"], r["cpu_seconds"], r["load"], "yes" if r.get("judged") else "no"
            rows.append(f"| {' | '.join(map(str, cells + times))} |")
    return "\n".join(rows)


def _file(name: str, ratio: float, seconds: float) -> Path:
    return HERE / "results" / f"{name}-{round(100 * ratio)}-{round(seconds)}s.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.planners.table", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where the published graphs are")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names")
    parser.add_argument("--force", action="store_true", help="run cases that have a result")
    chosen = parser.parse_args()
    for name, ratio, seconds, _ in CASES:
        path = _file(name, ratio, seconds)
        available = name.startswith("layered") or (chosen.folder / f"{name}.json").exists()
        if (
            available
            and name.startswith(tuple(chosen.only))
            and (chosen.force or not path.exists())
        ):
            write_atomic(
                path, json.dumps(measured(chosen.folder, name, ratio, seconds), indent=1) + "\n"
            )
    insert(HERE / "README.md", table())


if __name__ == "__main__":
    main()
