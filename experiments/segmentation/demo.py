"""`memplan demo`: train a 3D U-Net on whole volumes under a budget that the plain step exceeds, and show what it costs.

Three runs of the same steps on the same volumes, each in a process of its own: the plain step, the step only cut into
segments (what recompilation alone does to the losses), and the planned step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.segmentation.decathlon import open_dataset
from experiments.segmentation.phantoms import write_phantoms
from experiments.segmentation.training import factory
from experiments.segmentation.worker import WAYS
from memplan.errors import MemplanError
from memplan.files import write_whole
from memplan.planning.budget import parse_bytes, show_bytes
from models.unet3d import UNet3DConfig

FILTERS = 8
CASES = 2


class DemoFailedError(MemplanError):
    """A training run of the demo ended early; says what it printed."""


def main(
    size: int = 144, steps: int = 4, budget: str = "42%", data: Path | None = None, out: Path = Path("memplan-demo")
) -> int:
    """Run the demo; returns 0 if the plan fits, the losses agree and the resident set is smaller, else 1.

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
    dataset = open_dataset(data) if data else write_phantoms(root, cases=CASES, size=size)
    config = UNet3DConfig(filters=FILTERS, in_channels=len(dataset.modalities), classes=len(dataset.labels))
    plain_bytes = needed_bytes(size, config)
    limit = parse_bytes(budget, plain_bytes)
    results = {}
    with Progress(TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=Console(stderr=True)) as bars:  # fmt: skip
        for way in WAYS:
            results[way] = run(way, root, size, steps, limit, out / "report.json", bars)
    found = summary(results, plain_bytes, limit, size, steps)
    write_whole(out / "demo.json", json.dumps(found, indent=1) + "\n")
    show(found, Console(), out)
    return 0 if found["same_losses"] and found["resident_share"] < 1 else 1


def needed_bytes(size: int, config: UNet3DConfig) -> int:
    """Device bytes of the plain step, by the compiler."""
    step, args = factory(size, config)
    stats = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert stats is not None
    moved = stats.temp_size_in_bytes + stats.argument_size_in_bytes
    return moved + stats.output_size_in_bytes - stats.alias_size_in_bytes


def run(way: str, root: Path, size: int, steps: int, limit: int, report: Path, bars: Progress) -> dict[str, Any]:
    """One training process; its lines of JSON drive the bar."""
    bar = bars.add_task(f"{way} step", total=steps)
    options = {"way": way, "size": size, "steps": steps, "filters": FILTERS, "budget": limit, "report": report}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "experiments.segmentation.worker", str(root), *words]
    result: dict[str, Any] = {"losses": [], "seconds": []}
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            facts = json.loads(line)
            if "loss" in facts:
                result["losses"].append(facts["loss"])
                result["seconds"].append(facts["seconds"])
                bars.advance(bar)
            else:
                result.update(facts)
        process.wait()
        complaints.seek(0)
        errors = complaints.read()
    if process.returncode:
        raise DemoFailedError(f"the {way} run ended with code {process.returncode}:\n{errors[-2000:]}")
    return result


def summary(results: dict[str, Any], plain_bytes: int, limit: int, size: int, steps: int) -> dict[str, Any]:
    """What the demo found; losses agree if the planned ones are off by at most four times what cutting alone causes."""
    plain, cut, planned = (results[way]["losses"] for way in WAYS)
    recompilation = max(abs(a - b) / abs(a) for a, b in zip(plain, cut, strict=True))
    difference = max(abs(a - b) / abs(a) for a, b in zip(plain, planned, strict=True))
    tolerance = 4 * recompilation + float(jax.numpy.finfo(jax.numpy.float32).eps)
    return {
        "size": size,
        "steps": steps,
        "plain_bytes": plain_bytes,
        "budget_bytes": limit,
        "runs": results,
        "resident_share": results["planned"]["peak_rss"] / results["plain"]["peak_rss"],
        "recompilation_error": recompilation,
        "planned_error": difference,
        "tolerance": tolerance,
        "same_losses": difference <= tolerance,
        "loss_falls": planned[-1] < planned[0],
        "versions": {"jax": jax.__version__},
    }


def show(found: dict[str, Any], console: Console, out: Path) -> None:
    table = Table(title=f"3D U-Net, whole volumes of {found['size']}^3 voxels, {found['steps']} steps on the CPU")
    for heading in ("step", "loss, first to last", "seconds a step", "resident set"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for way in WAYS:
        one = found["runs"][way]
        seconds = sorted(one["seconds"])[len(one["seconds"]) // 2]
        losses = f"{one['losses'][0]:.6f} to {one['losses'][-1]:.6f}"
        table.add_row(way, losses, f"{seconds:.1f}", show_bytes(one["peak_rss"]))
    console.print(table)
    need, limit = show_bytes(found["plain_bytes"]), show_bytes(found["budget_bytes"])
    verdict = "the same" if found["same_losses"] else "NOT the same"
    console.print(
        f"The plain step needs {need}; the budget was {limit}. Resident set: {found['resident_share']:.0%} of plain."
    )
    console.print(
        f"Losses are {verdict}: off by {found['planned_error']:.1e}, tolerance {found['tolerance']:.1e} "
        f"(cutting alone: {found['recompilation_error']:.1e}). Written: {out / 'demo.json'}, {out / 'report.json'}"
    )
