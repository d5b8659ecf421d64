"""`memplan demo`: train a 3D U-Net on whole volumes under a budget that the plain step exceeds.

Runs the same steps on the same volumes twice, each time in a process of its own: with the plain
step, and with a step planned within a share of the plain step's bytes. Both use the same kernels,
so the losses must be bit-identical.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.applications.segmentation.decathlon import open_dataset
from experiments.applications.segmentation.phantoms import write_phantoms
from experiments.applications.segmentation.worker import VARIANTS
from memplan.errors import MemplanError
from memplan.io import write_atomic
from memplan.report.model import Report
from memplan.units import parse_bytes, show_bytes

FILTERS = 8
CASES = 2
SOURCES = Path(__file__).parents[3]
WORKER = "experiments.applications.segmentation.worker"


class DemoFailedError(MemplanError):
    """A training run of the demo failed; the message has its output."""


def main(
    size: int = 80,
    steps: int = 3,
    budget: str = "55%",
    data: Path | None = None,
    out: Path = Path("memplan-demo"),
) -> int:
    """Run the demo; returns 0 if the losses are the same in less memory, else 1.

    Args:
      size: voxels along each side of a volume, a multiple of 8.
      steps: training steps of each run.
      budget: device bytes of the planned step as in `memplan.jit`; a share is of the plain step's.
      data: a data set in the Decathlon layout; by default phantoms are written to `out`.
      out: folder for the phantoms, `demo.json`, and the planned step's `report.json` and page.
    """
    if size % 8:
        raise MemplanError(
            f"the U-Net halves its input three times: {size} is no multiple of 8. Try "
            f"{size // 8 * 8}."
        )
    out.mkdir(parents=True, exist_ok=True)
    root = data or out / f"phantoms-{size}"
    if data:
        open_dataset(data)
    else:
        write_phantoms(root, cases=CASES, size=size)
    columns = (
        TextColumn("{task.description:>22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        plain = run("plain", root, size, steps, bars)
        limit = parse_bytes(budget, plain["compiled_bytes"])
        planned = run(
            "planned",
            root,
            size,
            steps,
            bars,
            "--budget",
            str(limit),
            "--report",
            str(out / "report.json"),
        )
    figures = summary(plain, planned, limit, size, steps)
    Report.load_json(out / "report.json").save_html(out / "report.html")
    write_atomic(out / "demo.json", json.dumps(figures, indent=1) + "\n")
    show(figures, Console(), out)
    return 0 if figures["same_losses"] and figures["share_above_idle"] < 1 else 1


def run(
    variant: str, root: Path, size: int, steps: int, bars: Progress, *more: str
) -> dict[str, Any]:
    """Run one training process, whose lines of JSON drive the progress bar."""
    bar = bars.add_task(f"{variant} step", total=steps)
    options = {"way": variant, "size": size, "steps": steps, "filters": FILTERS}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # -P: no package in the current folder shadows `models` or `experiments`
    command = [sys.executable, "-P", "-m", WORKER, str(root), *words, *more]
    paths = os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH"))))
    result: dict[str, Any] = {"losses": [], "seconds": [], "cpu_seconds": []}
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            facts = json.loads(line)
            if "loss" in facts:
                result["losses"].append(facts["loss"])
                for name in ("seconds", "cpu_seconds"):
                    result[name].append(facts[name])
                bars.advance(bar)
            else:
                result.update(facts)
        process.wait()
        stderr.seek(0)
        errors = stderr.read()
    if process.returncode:
        raise DemoFailedError(
            f"the {variant} run ended with code {process.returncode}:\n{errors[-2000:]}"
        )
    return result


def summary(
    plain: dict[str, Any], planned: dict[str, Any], limit: int, size: int, steps: int
) -> dict[str, Any]:
    """The demo's figures. Losses are compared bit by bit, memory by how much a process grows.

    Steps are compared by the CPU seconds of the fastest step, which other work on the machine
    disturbs least.
    """
    plain_bits, planned_bits = (np.float32(run["losses"]).tobytes() for run in (plain, planned))
    above = [run["peak_rss"] - run["idle_rss"] for run in (plain, planned)]
    seconds = [min(run["cpu_seconds"]) for run in (plain, planned)]
    return {
        "size": size, "steps": steps, "budget_bytes": limit,
        "runs": {"plain": plain, "planned": planned},
        "share_above_idle": above[1] / above[0], "slower": seconds[1] / seconds[0] - 1,
        "same_losses": plain_bits == planned_bits,
        "loss_falls": planned["losses"][-1] < planned["losses"][0],
        "versions": {"jax": jax.__version__},
    }  # fmt: skip


def show(figures: dict[str, Any], console: Console, out: Path) -> None:
    table = Table(
        title=f"3D U-Net, whole volumes of {figures['size']}^3 voxels, "
        f"{figures['steps']} steps on the CPU"
    )
    headings = ("step", "best step", "all threads", "ready after", "compiled", "grows by")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for variant in VARIANTS:
        run = figures["runs"][variant]
        sizes = (
            show_bytes(nbytes)
            for nbytes in (run["compiled_bytes"], run["peak_rss"] - run["idle_rss"])
        )
        best = (f"{min(run[name]):.1f} s" for name in ("seconds", "cpu_seconds"))
        table.add_row(variant, *best, f"{run['ready_s']:.0f} s", *sizes)
    console.print(table)
    need = show_bytes(figures["runs"]["plain"]["compiled_bytes"])
    limit = show_bytes(figures["budget_bytes"])
    console.print(
        f"The plain step needs {need}; the budget was {limit}. The planned process grows by "
        f"{figures['share_above_idle']:.0%} of what the plain one grows by; its best step takes "
        f"{1 + figures['slower']:.0%} of the plain one's time of all threads."
    )
    verdict = "the same, to the last bit" if figures["same_losses"] else "NOT the same"
    losses = figures["runs"]["planned"]["losses"]
    console.print(
        f"Losses, {losses[0]:.6f} to {losses[-1]:.6f}, are {verdict}. "
        f"Written: {out / 'demo.json'}, {out / 'report.json'}. Memory over both steps, as a page: "
        f"{out / 'report.html'}"
    )
