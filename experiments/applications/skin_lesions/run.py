"""Trains a classifier and a segmentation of skin lesions within a budget, and scores them.

python -m experiments.applications.skin_lesions.run  # phantoms
python -m experiments.applications.skin_lesions.run --isic IMAGES MASKS TRUTH  # the ISIC archive
python -m experiments.applications.skin_lesions.run --table  # only the table

Writes results/cpu.json and the table of README.md.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memplan
from experiments.applications.skin_lesions import training
from experiments.applications.skin_lesions.isic import Dataset, open_dataset
from experiments.applications.skin_lesions.phantoms import write_phantoms
from experiments.readme import conditions, grid, insert
from memplan.io import write_atomic

RESULTS, README = (Path(__file__).parent / name for name in ("results/cpu.json", "README.md"))
LESIONS = 1024
HELD_OUT = 4  # Every fourth lesion is held out.
FIRST = 8  # Steps whose losses are compared with the plain step's: later ones amplify rounding.


def trained(task: training.Task, dataset: Dataset) -> dict[str, Any]:
    """One training within its budget on three quarters of the lesions; bytes by the compiler."""
    learnt = [lesion for number, lesion in enumerate(dataset.lesions) if number % HELD_OUT]
    step, (state, batch) = task.built
    planned = memplan.jit(step, budget=task.budget, donate_argnums=0).plan(state, batch)
    # The plain step runs first, as the planned one donates the state.
    _, plain = training.descend(jax.jit(step), state, training.batches(task, learnt), FIRST)
    state, losses = training.descend(
        planned.compile(), state, training.batches(task, learnt), task.steps
    )
    report = planned.report
    return {
        "name": task.name, "steps": task.steps, "plain_bytes": report.baseline_peak_bytes,
        "budget_bytes": report.budget_bytes, "device_bytes": report.compiled_peak_bytes,
        "planner": report.planner,
        "first_loss": float(losses[0]),  # nats, and shares of Dice
        "last_loss": float(losses[-max(1, task.steps // 10) :].mean()),
        "losses_off": float(np.max(np.abs(losses[:FIRST] / plain - 1))),  # relative to plain
        "scores": training.scores(task, state, dataset.lesions[::HELD_OUT]),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "trained",
        "steps",
        "plain MiB",
        "budget MiB",
        "device MiB",
        "chosen",
        "loss",
        "losses off",
        "held out",
    )
    lines = []
    for row in rows:
        nbytes = (
            f"{row[name] / 2**20:.1f}" for name in ("plain_bytes", "budget_bytes", "device_bytes")
        )
        loss = f"{row['first_loss']:.2f} to {row['last_loss']:.2f}"
        scores = ", ".join(f"{name} {share:.3f}" for name, share in row["scores"].items())
        lines.append(
            (
                row["name"],
                row["steps"],
                *nbytes,
                row["planner"],
                loss,
                f"{row['losses_off']:.0e}",
                scores,
            )
        )
    return grid(head, lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--isic", type=Path, nargs=3, metavar=("IMAGES", "MASKS", "TRUTH"), help="folders and a CSV"
    )
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        with tempfile.TemporaryDirectory() as scratch:
            dataset = (
                open_dataset(*args.isic)
                if args.isic
                else write_phantoms(Path(scratch) / "isic", LESIONS)
            )
            tasks = training.segmentation(), training.classification(len(dataset.classes))
            document = conditions("pillow", "jax", "flax", "optax", "grain", "numpy")
            document |= {
                "photographs": len(dataset.lesions),
                "trained": [trained(task, dataset) for task in tasks],
            }
        write_atomic(RESULTS, json.dumps(document, indent=1) + "\n")
    insert(README, table(json.loads(RESULTS.read_text())["trained"]))


if __name__ == "__main__":
    main()
