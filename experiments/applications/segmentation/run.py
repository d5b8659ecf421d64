"""Whole volumes against patches where context matters, and what inference takes either way.

python -m experiments.applications.segmentation.run  # cases without a result (extras gpu-aot and demo)
python -m experiments.applications.segmentation.run --only NAME ...  # these, again
python -m experiments.applications.segmentation.run --table  # rewrites the tables of README.md
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import memplan
from experiments.applications.segmentation.context import LABELS
from experiments.applications.segmentation.inference import Windows, places
from experiments.applications.segmentation.patches import (
    Scores,
    Settings,
    Way,
    compiled_bytes,
    forward,
    inferences,
    score,
    train,
    ways,
)
from experiments.readme import grid, measure_and_tell
from memplan import io
from models.unet3d import UNet3D, UNet3DConfig

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
SEEDS = (0, 1, 2)
DEVICE = "v100"
SIDE, PATCH = 240, 128
OUTPUTS = 64  # classes of a network for the whole brain
MIB = 2**20


@dataclass(frozen=True)
class Trained:
    """One training and what became of it.

    Attributes:
      voxels: seen in all steps.
      loss: mean of the last tenth of the steps.
      train_s: without compilation.
      scores: by inference.
    """

    way: str
    seed: int
    steps: int
    voxels: int
    loss: float
    train_s: float
    scores: dict[str, Scores]


@dataclass(frozen=True)
class Budgeted:
    """One training within a budget, or without one (None); bytes by the compiler, the score by `how` it predicts."""

    way: str
    how: str
    seed: int
    budget_bytes: int | None
    compiled_bytes: int
    loss: float
    train_s: float
    scores: Scores


@dataclass(frozen=True)
class Inference:
    """One prediction, compiled for a described GPU; bytes by the compiler, seconds by the roofline.

    Attributes:
      side: voxels along each side of what one prediction sees, `batch` at a time.
      predictions: that a volume of `SIDE`^3 voxels takes.
    """

    device: str
    side: int
    batch: int
    predictions: int
    device_bytes: int
    prediction_s: float


def trained(settings: Settings, name: str, way: Way, seed: int) -> Trained:
    state, loss, train_s = train(settings, way, seed)
    scores = {how: score(settings, infer) for how, infer in inferences(settings, state.params).items()}
    voxels = settings.steps * way.batch * way.side**3
    return Trained(name, seed, settings.steps, voxels, loss, train_s, scores)


def budgeted(way: str, how: str, seed: int) -> Budgeted:
    """The budget is a quarter of what a whole volume takes as it is."""
    settings = Settings(outputs=OUTPUTS)
    whole_bytes = compiled_bytes(settings, Way(settings.size, 1))
    side = settings.patch if way == "a patch" else settings.size
    budget = None if way == "a whole volume" else whole_bytes // 4
    one = Way(side, 1, budget)
    state, loss, train_s = train(settings, one, seed)
    found = score(settings, inferences(settings, state.params)[how])
    return Budgeted(way, how, seed, budget, compiled_bytes(settings, one), loss, train_s, found)


def inference(side: int, batch: int) -> Inference:
    config = UNet3DConfig()
    image = jax.ShapeDtypeStruct((batch, side, side, side, config.in_channels), np.float32)
    params = jax.eval_shape(UNet3D(config).init, jax.random.key(0), image)["params"]
    report = memplan.jit(forward(config), device=DEVICE).plan(params, image).report
    assert report.compiled_peak_bytes and report.predicted_step_s
    predictions = math.ceil(len(list(places((SIDE,) * 3, Windows((side,) * 3)))) / batch)
    return Inference(DEVICE, side, batch, predictions, report.compiled_peak_bytes, report.predicted_step_s)


TRAININGS: dict[str, Callable[[], Trained]] = {
    f"{name.removeprefix('a ').replace(' ', '_')}-{seed}": partial(trained, Settings(), name, way, seed)
    for name, way in ways(Settings()).items()
    for seed in SEEDS
}
BUDGETED: dict[str, Callable[[], Budgeted]] = {
    f"{name}-{seed}": partial(budgeted, way, how, seed)
    for seed in SEEDS
    for name, way, how in (
        ("outputs-whole", "a whole volume", "whole"),
        ("outputs-slabs", "a whole volume, in slabs", "whole"),
        ("outputs-patch", "a patch", "windows"),
    )
}
INFERENCES: dict[str, Callable[[], Inference]] = {
    f"inference-{side}-b{batch}": partial(inference, side, batch) for side, batch in ((SIDE, 1), (PATCH, 1), (PATCH, 4))
}


def measure(name: str) -> str:
    """The case's result as JSON, with what it was measured on."""
    row = {**TRAININGS, **BUDGETED, **INFERENCES}[name]()
    versions = dict(io.versions("jax", "flax", "optax", "numpy"))
    hardware = f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    return json.dumps({"hardware": hardware, "versions": versions, **asdict(row)}, indent=1)


def known_trainings() -> Iterator[Trained]:
    for found in _known(TRAININGS):
        scores = {how: Scores(tuple(one["dice"]), one["lesion_dice"]) for how, one in found.pop("scores").items()}
        yield Trained(**found, scores=scores)


def known_budgeted() -> Iterator[Budgeted]:
    for found in _known(BUDGETED):
        scores = found.pop("scores")
        yield Budgeted(**found, scores=Scores(tuple(scores["dice"]), scores["lesion_dice"]))


def known_inferences() -> Iterator[Inference]:
    yield from (Inference(**found) for found in _known(INFERENCES))


def _known(names: Sequence[str] | dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in (RESULTS / f"{name}.json" for name in names):
        if path.exists():
            found = json.loads(path.read_text())
            yield {name: value for name, value in found.items() if name not in ("hardware", "versions")}


def tables() -> str:
    return "\n".join(
        (by_way(list(known_trainings())), by_budget(list(known_budgeted())), by_inference(list(known_inferences())))
    )


def by_way(rows: Sequence[Trained]) -> str:
    """Hard Dice in per cent: the mean over seeds, and the lowest and highest."""
    head, lines = ("a step sees", "steps", "Mvoxels seen", "predicted", "lesion", *LABELS[1:], "training s"), []
    for way in dict.fromkeys(row.way for row in rows):
        of_way = [row for row in rows if row.way == way]
        seen = of_way[0].voxels / 1e6
        seconds = statistics.mean(row.train_s for row in of_way)
        for how in of_way[0].scores:
            scores = [row.scores[how] for row in of_way]
            dice = [_spread([one.dice[label] for one in scores]) for label in range(1, len(LABELS))]
            lesion = _spread([one.lesion_dice for one in scores])
            lines.append((way, of_way[0].steps, f"{seen:.1f}", how, lesion, *dice, f"{seconds:.0f}"))
    return grid(head, lines) + "\n"


def by_budget(rows: Sequence[Budgeted]) -> str:
    """As `by_way`, with the bytes of a step."""
    head = ("a step sees", "predicted", "budget MiB", "step MiB", "last loss", "lesion", *LABELS[1:], "training s")
    lines = []
    for way in dict.fromkeys(row.way for row in rows):
        of_way = [row for row in rows if row.way == way]
        first, loss = of_way[0], statistics.mean(row.loss for row in of_way)
        lesion = _spread([row.scores.lesion_dice for row in of_way])
        dice = [_spread([row.scores.dice[label] for row in of_way]) for label in range(1, len(LABELS))]
        budget = "" if first.budget_bytes is None else f"{first.budget_bytes / MIB:.1f}"
        seconds = f"{statistics.mean(row.train_s for row in of_way):.0f}"
        lines.append(
            (way, first.how, budget, f"{first.compiled_bytes / MIB:.1f}", f"{loss:.4f}", lesion, *dice, seconds)
        )
    return grid(head, lines) + "\n"


def by_inference(rows: Sequence[Inference]) -> str:
    lines = (
        (
            f"{row.batch} x {row.side}^3", row.predictions, f"{row.device_bytes / MIB:.0f}",
            f"{row.predictions * row.prediction_s:.2f}",
        )
        for row in rows
    )  # fmt: skip
    return grid(("prediction of", "for a volume", "device MiB", "s a volume"), lines) + "\n"


def _spread(shares: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in (statistics.mean(shares), min(shares), max(shares)))
    return f"{mean:.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    measure_and_tell(__doc__, [*TRAININGS, *BUDGETED, *INFERENCES], measure, README, tables, keep=True)


if __name__ == "__main__":
    main()
