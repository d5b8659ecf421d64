"""Whole volumes against patches, where context matters: is a planned step as good as a plain one?

python -m experiments.applications.segmentation.run  # all cases; --only NAME ... for some
python -m experiments.applications.segmentation.run --table  # rewrites the table of README.md
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memplan
from experiments.applications.segmentation.context import LABELS, draw
from experiments.applications.segmentation.decathlon import Volume
from experiments.applications.segmentation.losses import hard_dice
from experiments.readme import command_line, conditions, grid
from models.train import Batch, Step, TrainState, unet3d_step
from models.unet3d import UNet3D, UNet3DConfig

README = Path(__file__).parent / "README.md"
TRAINING, HELD_OUT = 0, 1  # Seeds of phantoms.
FOREGROUND = 1 / 3  # Share of patches centred on a voxel of a lesion, as in nnU-Net.
METHODS = {"whole": "a whole volume", "slabs": "a whole volume, in slabs", "patch": "a patch"}
CASES = [f"outputs-{method}-{seed}" for seed in range(3) for method in METHODS]
# Phantoms have only the first three classes.
NETWORK = UNet3DConfig(levels=3, filters=8, classes=64, in_channels=1)


@dataclass(frozen=True)
class Settings:
    """The settings that all trainings share; sides are in voxels."""

    size: int = 16
    patch: int = 8
    steps: int = 400
    heads: int = 64  # phantoms to train on
    held_out: int = 16  # and to score
    model: UNet3DConfig = NETWORK

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.adam(
            optax.warmup_cosine_decay_schedule(0.0, 1e-2, self.steps // 10, self.steps)
        )


@dataclass(frozen=True)
class Trained:
    """One training: bytes by the compiler, hard Dice over all voxels of the held-out volumes."""

    way: str
    seed: int
    budget_bytes: int | None
    compiled_bytes: int
    loss: float  # mean of the last tenth of the steps
    dice: tuple[float, ...]  # of each class of `context.LABELS`
    lesion_dice: float  # of lesion against background, whichever lesion


def trained(settings: Settings, method: str, seed: int) -> Trained:
    """Train on whole volumes or patches; the budget is a quarter of the plain whole-volume step."""
    budget = None if method == "whole" else compiled(settings, settings.size, None)[1] // 4
    side = settings.patch if method == "patch" else settings.size
    run, nbytes = compiled(settings, side, budget)
    params = jax.jit(UNet3D(settings.model).init)(
        jax.random.key(seed), jnp.zeros((1, side, side, side, 1))
    )["params"]
    state = TrainState(jnp.zeros((), jnp.int32), params, {}, settings.optimizer.init(params))
    losses = []
    for batch in batches(settings, side, seed):
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    last = np.array(jax.device_get(losses[-max(1, settings.steps // 10) :])).mean()
    return Trained(
        METHODS[method], seed, budget, nbytes, float(last), *score(settings, side, state.params)
    )


@cache
def compiled(settings: Settings, side: int, budget: int | None) -> tuple[Step, int]:
    """The step on one cube, planned if there is a budget, and its bytes; cached for all seeds."""
    step, args = unet3d_step(side, 1, settings.model, settings.optimizer)
    planned = memplan.jit(step, budget=budget, donate_argnums=0).plan(*args)
    assert planned.report.compiled_peak_bytes is not None
    return planned.compile(), planned.report.compiled_peak_bytes


def batches(settings: Settings, side: int, seed: int) -> Iterator[Batch]:
    random = np.random.default_rng(seed)
    volumes = [draw(settings.size, TRAINING, number).volume for number in range(settings.heads)]
    for _ in range(settings.steps):
        crop = random_patch(volumes[int(random.integers(len(volumes)))], side, random)
        yield {"image": crop.image[None], "label": crop.label[None]}


def random_patch(volume: Volume, side: int, random: np.random.Generator) -> Volume:
    """A random cube of `side` voxels; a share `FOREGROUND` is centred on a voxel of a lesion."""
    shape = np.array(volume.label.shape)
    corner = random.integers(0, shape - side + 1)
    if random.random() < FOREGROUND:
        lesion: np.ndarray = np.argwhere(volume.label)
        corner = np.clip(random.choice(lesion) - side // 2, 0, shape - side)
    box = tuple(slice(low, low + side) for low in corner.tolist())
    return Volume(volume.image[box], volume.label[box])


def score(settings: Settings, side: int, params: Any) -> tuple[tuple[float, ...], float]:
    """Hard Dice of each class and of lesions on held-out phantoms, predicted in cubes of `side`."""
    network: Any = UNet3D(settings.model)
    predict = jax.jit(lambda params, images: network.apply({"params": params}, images).argmax(-1))
    answers, true = [], []
    for number in range(settings.held_out):
        volume = draw(settings.size, HELD_OUT, number).volume
        answers.append(predict(params, cubes(volume.image, side)))
        true.append(cubes(volume.label, side))
    answers, true = jnp.concatenate(answers), jnp.concatenate(true)
    dice, lesion = hard_dice(answers, true, len(LABELS)), hard_dice(answers > 0, true > 0, 2)
    return tuple(map(float, dice)), float(lesion[1])


def cubes(array: np.ndarray, side: int) -> np.ndarray:
    """Cut an array [X, Y, Z, ...] with X = Y = Z into [cubes, side, side, side, ...]."""
    count, channels = len(array) // side, array.shape[3:]
    cut = array.reshape(count, side, count, side, count, side, *channels)
    return np.moveaxis(cut, (2, 4), (1, 2)).reshape(-1, side, side, side, *channels)


def measure(name: str) -> str:
    _, method, seed = name.split("-")
    row = asdict(trained(Settings(), method, int(seed)))
    return json.dumps({**conditions("jax", "flax", "optax", "numpy"), **row}, indent=1)


def stored_rows() -> list[dict[str, Any]]:
    return [json.loads((README.parent / "results" / f"{name}.json").read_text()) for name in CASES]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Hard Dice in per cent: mean, lowest and highest over seeds."""
    head, lines = ("a step sees", "budget MiB", "step MiB", "last loss", "lesion", *LABELS[1:]), []
    for method in METHODS.values():
        of_way = [row for row in rows if row["way"] == method]
        budget, step = (of_way[0][name] for name in ("budget_bytes", "compiled_bytes"))
        loss = statistics.mean(row["loss"] for row in of_way)
        cells = [f"{budget / 2**20:.1f}" if budget else "", f"{step / 2**20:.1f}", f"{loss:.4f}"]
        for shares in zip(*([row["lesion_dice"], *row["dice"][1:]] for row in of_way), strict=True):
            mean, low, high = (
                100 * share for share in (statistics.mean(shares), min(shares), max(shares))
            )
            cells.append(f"{mean:.0f} ({low:.0f} to {high:.0f})")
        lines.append((method, *cells))
    return grid(head, lines) + "\n"


if __name__ == "__main__":
    command_line(__doc__, CASES, measure, README, lambda: table(stored_rows()))
