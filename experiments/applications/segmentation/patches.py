"""A 3D U-Net trained on whole volumes or on random patches of them, on phantoms whose labels depend on context.

Volumes, network, optimizer and the number of steps are the same; only what one step sees differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import memplan
from experiments.applications.segmentation.context import LABELS, Head, draw
from experiments.applications.segmentation.decathlon import Volume
from experiments.applications.segmentation.inference import Windows, sliding, whole
from experiments.applications.segmentation.losses import hard_dice
from models.train import Batch, Step, TrainState, unet3d_step
from models.unet3d import UNet3D, UNet3DConfig

TRAINING, HELD_OUT = 0, 1  # seeds of phantoms
FOREGROUND = 1 / 3
"""Share of the patches that are centred on a lesion's voxel, as in nnU-Net."""


@dataclass(frozen=True)
class Settings:
    """What all trainings have in common; sides in voxels.

    Attributes:
      heads, held_out: phantoms to train on and to score.
      rate: peak learning rate of Adam; it rises over a tenth of the steps and falls to zero by half a cosine.
      outputs: classes that the network tells apart; phantoms have the first `len(context.LABELS)`.
    """

    size: int = 16
    patch: int = 8
    levels: int = 3
    filters: int = 8
    steps: int = 400
    heads: int = 64
    held_out: int = 16
    rate: float = 1e-2
    outputs: int = len(LABELS)

    @property
    def model(self) -> UNet3DConfig:
        return UNet3DConfig(self.levels, self.filters, classes=self.outputs, in_channels=1)

    @property
    def patches_a_volume(self) -> int:
        return (self.size // self.patch) ** 3


@dataclass(frozen=True)
class Way:
    """What one step sees: so many cubes of `side` voxels; and the bytes that it is planned for, None for all."""

    side: int
    batch: int
    budget: int | None = None


def ways(settings: Settings) -> dict[str, Way]:
    """By name; the patches of the last have as many voxels as the volume of the first."""
    return {
        "a whole volume": Way(settings.size, 1),
        "a patch": Way(settings.patch, 1),
        f"{settings.patches_a_volume} patches": Way(settings.patch, settings.patches_a_volume),
    }


@dataclass(frozen=True)
class Scores:
    """Attributes:
    dice: hard Dice of each class of `context.LABELS`, over the voxels of all held-out volumes together.
    lesion_dice: likewise of lesion against background, whichever lesion.
    """

    dice: tuple[float, ...]
    lesion_dice: float


def reach(levels: int) -> int:
    """How far from a voxel the U-Net's convolutions see at least, in voxels along each axis, to either side.

    Two 3-convolutions a level, on the way down and on the way up, see two voxels of that level far, each 2^level wide.
    """
    return sum(2 * 2**level for level in range(levels)) + sum(2 * 2**level for level in range(levels - 1))


def random_patch(volume: Volume, side: int, random: np.random.Generator) -> Volume:
    """A cube of `side` voxels, anywhere inside or, in `FOREGROUND` of all cases, about a voxel of a lesion."""
    shape = np.array(volume.label.shape)
    corner = random.integers(0, shape - side + 1)
    if random.random() < FOREGROUND:
        lesion: np.ndarray = np.argwhere(volume.label)
        corner = np.clip(random.choice(lesion) - side // 2, 0, shape - side)
    box = tuple(slice(low, low + side) for low in corner.tolist())
    return Volume(volume.image[box], volume.label[box])


def train(settings: Settings, way: Way, seed: int) -> tuple[TrainState, float, float]:
    """The state after all steps, the mean loss of the last tenth of them, and seconds without compilation."""
    initial, run, _ = _compiled(settings, way)
    state, start, losses = initial(jax.random.key(seed)), time.perf_counter(), []
    for batch in _batches(settings, way, seed):
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    last = np.array(jax.device_get(losses[-max(1, settings.steps // 10) :]))
    return state, float(last.mean()), time.perf_counter() - start


def compiled_bytes(settings: Settings, way: Way) -> int:
    """What a step takes, by the compiler."""
    return _compiled(settings, way)[2]


@cache
def _compiled(settings: Settings, way: Way) -> tuple[Callable[[jax.Array], TrainState], Step, int]:
    """The first state from a key, the step and its bytes; compiled once for all seeds."""
    rate = optax.warmup_cosine_decay_schedule(0.0, settings.rate, settings.steps // 10, settings.steps)
    optimizer = optax.adam(rate)
    step, (state, batch) = unet3d_step(way.side, way.batch, settings.model, optimizer)
    image = jnp.zeros((1, *batch["image"].shape[1:]))

    def initial(key: jax.Array) -> TrainState:
        params = UNet3D(settings.model).init(key, image)["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, {}, optimizer.init(params))

    planned = memplan.jit(step, budget=way.budget, donate_argnums=0).plan(state, batch)
    assert planned.report.compiled_peak_bytes is not None
    return jax.jit(initial), planned.compile(), planned.report.compiled_peak_bytes


def _batches(settings: Settings, way: Way, seed: int) -> Iterator[Batch]:
    random = np.random.default_rng(seed)
    heads = training_heads(settings.size, settings.heads)
    for _ in range(settings.steps):
        seen = [
            random_patch(heads[int(random.integers(len(heads)))].volume, way.side, random) for _ in range(way.batch)
        ]
        yield {"image": np.stack([one.image for one in seen]), "label": np.stack([one.label for one in seen])}


@cache
def training_heads(size: int, count: int) -> Sequence[Head]:
    return [draw(size, TRAINING, number) for number in range(count)]


def inferences(settings: Settings, params: Any) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The two ways to predict a volume: image [X, Y, Z, 1] -> logits [X, Y, Z, C]."""
    run = _predictor(settings.model)

    def predict(images: np.ndarray) -> Any:
        return run(params, images)

    windows = Windows((settings.patch,) * 3, batch=9)
    return {
        "whole": lambda image: whole(predict, image, 2 ** (settings.levels - 1)),
        "windows": lambda image: sliding(predict, image, windows),
    }


@cache
def _predictor(config: UNet3DConfig) -> Callable[[Any, Any], Any]:
    return memplan.jit(forward(config))


def forward(config: UNet3DConfig) -> Callable[[Any, Any], Any]:
    """(params, images [B, X, Y, Z, M]) -> logits [B, X, Y, Z, C]."""

    def apply(params: Any, images: Any) -> Any:
        return UNet3D(config).apply({"params": params}, images)

    return apply


def score(settings: Settings, infer: Callable[[np.ndarray], np.ndarray]) -> Scores:
    """Hard Dice over phantoms that no training sees, half of them with a bright marker."""
    volumes = [draw(settings.size, HELD_OUT, number).volume for number in range(settings.held_out)]
    true = jnp.stack([volume.label for volume in volumes])
    found = jnp.stack([infer(volume.image).argmax(-1) for volume in volumes])
    dice, lesion = hard_dice(found, true, len(LABELS)), hard_dice(found > 0, true > 0, 2)
    return Scores(tuple(map(float, dice)), float(lesion[1]))
