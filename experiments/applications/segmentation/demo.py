"""`memplan demo`: train a 3D U-Net on whole volumes under a budget that the plain step exceeds, and show what it costs.

Two runs of the same steps on the same volumes, each in a process of its own: the plain step, and the planned one within
a share of what the compiler says that the plain one takes. Both use the same kernels: the losses have to agree to the
last bit.
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
from experiments.applications.segmentation.worker import WAYS
from memplan.errors import MemplanError
from memplan.io import write_atomic
from memplan.units import parse_bytes, show_bytes

FILTERS = 8
CASES = 2
SOURCES = Path(__file__).parents[3]


class DemoFailedError(MemplanError):
    """A training run of the demo ended early; says what it printed."""


def main(
    size: int = 80, steps: int = 3, budget: str = "55%", data: Path | None = None, out: Path = Path("memplan-demo")
) -> int:
    """Run the demo; returns 0 if the plan fits, the losses are the same and the resident set grows by less, else 1.

    Args:
      size: voxels along each side of a volume, a multiple of 8.
      steps: training steps of each run.
      budget: device bytes of the planned run, as `memplan.jit` takes them; a share is of the plain step's own need.
      data: a data set in the Decathlon layout; phantoms are written to `out` where it is left out.
      out: folder for the phantoms and for `demo.json` and `report.json`.
    """
    if size % 8:
        raise MemplanError(f"the U-Net halves its input three times: {size} is no multiple of 8. Try {size // 8 * 8}.")
    out.mkdir(parents=True, exist_ok=True)
    root = data or out / f"phantoms-{size}"
    if data:
        open_dataset(data)
    else:
        write_phantoms(root, cases=CASES, size=size)
    with Progress(TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True)) as bars:  # fmt: skip
        plain = run("plain", root, size, steps, bars)
        limit = parse_bytes(budget, plain["compiled_bytes"])
        planned = run("planned", root, size, steps, bars, "--budget", str(limit), "--report", str(out / "report.json"))
    found = summary(plain, planned, limit, size, steps)
    write_atomic(out / "demo.json", json.dumps(found, indent=1) + "\n")
    show(found, Console(), out)
    return 0 if found["same_losses"] and found["share_above_idle"] < 1 else 1


def run(way: str, root: Path, size: int, steps: int, bars: Progress, *more: str) -> dict[str, Any]:
    """One training process; its lines of JSON drive the bar."""
    bar = bars.add_task(f"{way} step", total=steps)
    options = {"way": way, "size": size, "steps": steps, "filters": FILTERS}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    # -P: no package of the current folder takes the place of `models` or `experiments`
    command = [sys.executable, "-P", "-m", "experiments.applications.segmentation.worker", str(root), *words, *more]
    paths = os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH"))))
    result: dict[str, Any] = {"losses": [], "seconds": [], "cpu_seconds": []}
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            facts = json.loads(line)
            if "loss" in facts:
                for name, figure in (("losses", "loss"), ("seconds", "seconds"), ("cpu_seconds", "cpu_seconds")):
                    result[name].append(facts[figure])
                bars.advance(bar)
            else:
                result.update(facts)
        process.wait()
        complaints.seek(0)
        errors = complaints.read()
    if process.returncode:
        raise DemoFailedError(f"the {way} run ended with code {process.returncode}:\n{errors[-2000:]}")
    return result


def summary(plain: dict[str, Any], planned: dict[str, Any], limit: int, size: int, steps: int) -> dict[str, Any]:
    """What the demo found: losses are the same where their bits are; memory is what a process grows by.

    Steps are compared by the seconds of all threads, of the best one: other work on the machine does not stretch those.
    """
    plain_bits, planned_bits = (np.float32(one["losses"]).tobytes() for one in (plain, planned))
    above = [one["peak_rss"] - one["idle_rss"] for one in (plain, planned)]
    seconds = [min(one["cpu_seconds"]) for one in (plain, planned)]
    return {
        "size": size, "steps": steps, "budget_bytes": limit, "runs": {"plain": plain, "planned": planned},
        "share_above_idle": above[1] / above[0], "slower": seconds[1] / seconds[0] - 1,
        "same_losses": plain_bits == planned_bits, "loss_falls": planned["losses"][-1] < planned["losses"][0],
        "versions": {"jax": jax.__version__},
    }  # fmt: skip


def show(found: dict[str, Any], console: Console, out: Path) -> None:
    table = Table(title=f"3D U-Net, whole volumes of {found['size']}^3 voxels, {found['steps']} steps on the CPU")
    headings = ("step", "best step", "all threads", "ready after", "compiled", "grows by")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for way in WAYS:
        run = found["runs"][way]
        sizes = (show_bytes(nbytes) for nbytes in (run["compiled_bytes"], run["peak_rss"] - run["idle_rss"]))
        best = (f"{min(run[name]):.1f} s" for name in ("seconds", "cpu_seconds"))
        table.add_row(way, *best, f"{run['ready_s']:.0f} s", *sizes)
    console.print(table)
    need, limit = show_bytes(found["runs"]["plain"]["compiled_bytes"]), show_bytes(found["budget_bytes"])
    console.print(
        f"The plain step needs {need}; the budget was {limit}. The planned process grows by "
        f"{found['share_above_idle']:.0%} of what the plain one grows by; its best step takes "
        f"{1 + found['slower']:.0%} of the plain one's time of all threads."
    )
    verdict = "the same, to the last bit" if found["same_losses"] else "NOT the same"
    losses = found["runs"]["planned"]["losses"]
    console.print(
        f"Losses, {losses[0]:.6f} to {losses[-1]:.6f}, are {verdict}. "
        f"Written: {out / 'demo.json'}, {out / 'report.json'}"
    )
