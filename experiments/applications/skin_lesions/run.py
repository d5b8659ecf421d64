"""From photographs of skin lesions to a deployed detector: prepare, train within a budget, evaluate, export, deploy.

python -m experiments.applications.skin_lesions.run  # phantoms; writes results/cpu.json
python -m experiments.applications.skin_lesions.run --images DIR --masks DIR --truth CSV  # the ISIC archive's own
python -m experiments.applications.skin_lesions.run --table  # rewrites the tables of README.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.applications.skin_lesions.detector import EXAMINED_AT_ONCE
from experiments.applications.skin_lesions.isic import Dataset, Lesion, open_dataset
from experiments.applications.skin_lesions.phantoms import write_phantoms
from experiments.applications.skin_lesions.preparing import examples_of, training_batches
from experiments.applications.skin_lesions.scores import area_under_roc, balanced_accuracy, overlaps
from experiments.applications.skin_lesions.training import (
    CLASSIFIER,
    OUTLINER,
    Task,
    classification,
    descend,
    exported,
    predicted,
    segmentation,
    train,
)
from experiments.readme import grid, insert
from memplan import io
from memplan.io import write_atomic
from models.train import TrainState

HERE = Path(__file__).parent
RESULTS, README = HERE / "results" / "cpu.json", HERE / "README.md"
LESIONS, SEED = 1024, 0
HELD_OUT = 4  # every fourth lesion
FIRST = 8  # steps whose losses the plain step repeats
HIDDEN = ("flax", "optax", "models", "memplan", "experiments.applications.skin_lesions.training")
MIB = 2**20


@dataclass(frozen=True)
class Trained:
    """One training within its budget; bytes by the compiler.

    Attributes:
      first_loss, last_loss: of the first step, and the mean of the last tenth, in nats and shares of Dice.
      losses_off: by how much the first losses differ from the plain step's, relatively, at most.
      train_s: planning included.
      scores: on the lesions held out, (name, 0 to 1).
    """

    name: str
    steps: int
    plain_bytes: int
    budget_bytes: int
    device_bytes: int
    planner: str
    first_loss: float
    last_loss: float
    losses_off: float
    train_s: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Deployed:
    """The detector in a process that can import neither network nor training code.

    Attributes:
      nbytes: of the exported file.
      photographs: that were classified.
      same: how many of them got, of every class, the very share that the training process computes, to the bit.
      off: largest difference of a share.
      accuracy: balanced, of the lesions held out.
    """

    nbytes: int
    photographs: int
    same: int
    off: float
    accuracy: float


def trained(name: str, task: Task, lesions: Sequence[Lesion]) -> tuple[TrainState, dict[str, Any]]:
    """The state after training, and all of `Trained` but the scores."""
    settings, (step, (first_state, _)) = task.settings, task.built
    some = itertools.islice(training_batches(lesions, task.prepare, settings.batch, SEED), FIRST)
    _, plain = descend(jax.jit(step), first_state, some)  # first: the planned step takes the state's buffers
    start = time.perf_counter()
    state, losses, report = train(task, training_batches(lesions, task.prepare, settings.batch, SEED))
    train_s = time.perf_counter() - start
    figures = {
        "name": name,
        "steps": settings.steps,
        "plain_bytes": report.baseline_peak_bytes,
        "budget_bytes": report.budget_bytes,
        "device_bytes": report.compiled_peak_bytes,
        "planner": report.planner,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-max(1, settings.steps // 10) :].mean()),
        "losses_off": float(np.max(np.abs(losses[:FIRST] / plain - 1))),
        "train_s": train_s,
    }
    return state, figures


def outlines(dataset: Dataset, task: Task) -> Trained:
    """Train a segmentation and score its masks."""
    learnt, held_out = split(dataset.lesions)
    state, figures = trained("U-Net, masks", task, learnt)
    examples = examples_of(held_out, task.prepare)
    masks = predicted(task.predict(state), examples["image"], EXAMINED_AT_ONCE)
    dice, jaccard = overlaps(examples["label"] > 0, masks)
    return Trained(**figures, scores={"Dice": dice, "Jaccard": jaccard})


def classes(dataset: Dataset, task: Task, detector: Path) -> tuple[Trained, Deployed]:
    """Train a classifier, score it, export it to `detector` and deploy that."""
    learnt, held_out = split(dataset.lesions)
    state, figures = trained("ResNet, classes", task, learnt)
    examples = examples_of(held_out, task.prepare)
    here = predicted(task.predict(state), examples["image"], EXAMINED_AT_ONCE)
    shares = np.stack([here[name] for name in dataset.classes], axis=-1)
    scores = _scores(examples["label"], shares)
    write_atomic(detector, exported(task.predict(state), task.settings.side))
    there = np.array([[told[name] for name in dataset.classes] for told in deployed(detector, held_out)], np.float32)
    same = int((there == shares).all(-1).sum())
    accuracy = balanced_accuracy(examples["label"], there.argmax(-1))
    found = Deployed(detector.stat().st_size, len(held_out), same, float(abs(there - shares).max()), accuracy)
    return Trained(**figures, scores=scores), found


def _scores(labels: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    accuracy = balanced_accuracy(labels, shares.argmax(-1))
    return {"balanced accuracy": accuracy, "area under ROC": area_under_roc(labels, shares)}


def deployed(detector: Path, lesions: Sequence[Lesion]) -> list[dict[str, float]]:
    """The shares that the detector's own command prints, in a process where nothing of `HIDDEN` can be imported.

    Raises:
      RuntimeError: it ended with an error; says what it printed.
    """
    hidden = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN})); "
    start = f"{hidden}from experiments.applications.skin_lesions.detector import main; main()"
    photographs = [str(lesion.image) for lesion in lesions]
    ran = subprocess.run([sys.executable, "-c", start, str(detector), *photographs], capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the detector ended with code {ran.returncode}:\n{ran.stderr[-2000:]}")
    return [json.loads(line)["shares"] for line in ran.stdout.splitlines()]


def split(lesions: Sequence[Lesion]) -> tuple[list[Lesion], list[Lesion]]:
    """To learn from, and held out."""
    return [one for n, one in enumerate(lesions) if n % HELD_OUT], list(lesions[::HELD_OUT])


def document(trainings: Sequence[Trained], deployment: Deployed, photographs: int) -> str:
    versions = dict(io.versions("pillow", "jax", "flax", "optax", "grain", "numpy"))
    found = {
        "hardware": f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "versions": versions,
        "photographs": photographs,
        "trained": [asdict(one) for one in trainings],
        "deployed": asdict(deployment),
    }
    return json.dumps(found, indent=1) + "\n"


def known() -> tuple[list[Trained], Deployed]:
    found = json.loads(RESULTS.read_text())
    return [Trained(**one) for one in found["trained"]], Deployed(**found["deployed"])


def tables() -> str:
    trainings, deployment = known()
    return "\n".join((by_training(trainings), by_deployment(deployment)))


def by_training(rows: Sequence[Trained]) -> str:
    head = ("trained", "steps", "plain MiB", "budget MiB", "device MiB", "chosen", "loss", "losses off", "held out")
    lines = []
    for row in rows:
        nbytes = (f"{one / MIB:.1f}" for one in (row.plain_bytes, row.budget_bytes, row.device_bytes))
        loss = f"{row.first_loss:.2f} to {row.last_loss:.2f}"
        scores = ", ".join(f"{name} {share:.3f}" for name, share in row.scores.items())
        lines.append((row.name, row.steps, *nbytes, row.planner, loss, f"{row.losses_off:.0e}", scores))
    return grid(head, lines) + "\n"


def by_deployment(row: Deployed) -> str:
    head = ("exported KiB", "photographs", "same to the bit", "shares off by", "balanced accuracy")
    cells = f"{row.nbytes / 1024:.0f}", row.photographs, row.same, f"{row.off:.0e}", f"{row.accuracy:.3f}"
    return grid(head, [cells]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, what in (("images", "folder of *.jpg"), ("masks", "folder of *_segmentation.png"), ("truth", "CSV")):
        parser.add_argument(f"--{name}", type=Path, help=f"{what}; all three or none, for phantoms")
    parser.add_argument("--detector", type=Path, help="where to keep the exported detector")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    given = [args.images, args.masks, args.truth]
    if any(given) and not all(given):
        parser.error("--images, --masks and --truth belong together")
    if not args.table:
        with tempfile.TemporaryDirectory() as scratch:
            dataset = open_dataset(*given) if all(given) else write_phantoms(Path(scratch) / "isic", LESIONS, SEED)
            masks = outlines(dataset, segmentation(OUTLINER))
            print(masks, flush=True)
            task, detector = (
                classification(CLASSIFIER, dataset.classes),
                args.detector or Path(scratch) / "detector.bin",
            )
            found, deployment = classes(dataset, task, detector)
            print(found, deployment, sep="\n", flush=True)
            RESULTS.parent.mkdir(exist_ok=True)
            write_atomic(RESULTS, document([masks, found], deployment, len(dataset.lesions)))
    insert(README, tables())


if __name__ == "__main__":
    main()
