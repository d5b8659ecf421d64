"""A 3D U-Net trained on whole volumes or on random patches of them, on phantoms whose labels depend on context.

Volumes, network, optimizer and the number of steps, or of voxels seen, are the same; only what one step sees differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import optax

import memplan
from experiments.segmentation.context import LABELS, Head, draw
from experiments.segmentation.decathlon import Volume
from experiments.segmentation.inference import Predict, Windows, sliding, whole
from experiments.segmentation.losses import hard_dice
from experiments.segmentation.training import batch_of, factory
from models.train import TrainState
from models.unet3d import UNet3D, UNet3DConfig

TRAINING, HELD_OUT = 0, 1  # seeds of phantoms
FOREGROUND = 1 / 3
"""Share of the patches that are centred on a lesion's voxel, as in nnU-Net."""


@dataclass(frozen=True)
class Settings:
    """What all trainings have in common; sides in voxels.

    Attributes:
      steps: of a training on whole volumes; each sees one volume.
      heads, held_out: phantoms to train on and to score.
      rate: peak learning rate of Adam; it rises over a tenth of the steps and falls to zero by half a cosine.
    """

    size: int = 32
    patch: int = 16
    levels: int = 4
    filters: int = 8
    steps: int = 120
    heads: int = 64
    held_out: int = 16
    rate: float = 3e-3

    @property
    def model(self) -> UNet3DConfig:
        return UNet3DConfig(self.levels, self.filters, classes=len(LABELS), in_channels=1)

    @property
    def patches_a_volume(self) -> int:
        return (self.size // self.patch) ** 3


@dataclass(frozen=True)
class Way:
    """What one step sees, a cube of `side` voxels, and how many steps there are."""

    side: int
    steps: int


def ways(settings: Settings) -> dict[str, Way]:
    return {
        "whole volumes": Way(settings.size, settings.steps),
        "patches, as many steps": Way(settings.patch, settings.steps),
        "patches, as many voxels": Way(settings.patch, settings.steps * settings.patches_a_volume),
    }


@dataclass(frozen=True)
class Scores:
    """Attributes:
    dice: hard Dice of each class of `context.LABELS`, mean over the held-out volumes in which it occurs or was found.
    lesion_dice: of lesion against background, whichever lesion.
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
        lesion = np.argwhere(volume.label)
        corner = np.clip(random.choice(lesion) - side // 2, 0, shape - side)
    box = tuple(slice(low, low + side) for low in corner)
    return Volume(volume.image[box], volume.label[box])


def train(settings: Settings, way: Way, seed: int) -> tuple[TrainState, float, float]:
    """The state after all steps, the mean loss of the last tenth of them, and seconds without compilation."""
    rate = optax.warmup_cosine_decay_schedule(0.0, settings.rate, way.steps // 10, way.steps)
    step, (state, batch) = factory(way.side, settings.model, optax.adam(rate), concrete=True, seed=seed)
    run = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    start, losses = time.perf_counter(), []
    for batch in _batches(settings, way, seed):
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    last = np.array(jax.device_get(losses[-max(1, way.steps // 10) :]))
    return state, float(last.mean()), time.perf_counter() - start


def _batches(settings: Settings, way: Way, seed: int) -> Iterator[Any]:
    random = np.random.default_rng(seed)
    heads = training_heads(settings.size, settings.heads)
    for _ in range(way.steps):
        volume = heads[random.integers(len(heads))].volume
        yield batch_of(volume if way.side == settings.size else random_patch(volume, way.side, random))


@cache
def training_heads(size: int, count: int) -> Sequence[Head]:
    return [draw(size, TRAINING, number) for number in range(count)]


def inferences(settings: Settings, params: Any) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The two ways to predict a volume: image [X, Y, Z, 1] -> logits [X, Y, Z, C]."""
    predict = predictor(settings.model, params)
    windows = Windows((settings.patch,) * 3)
    return {
        "whole": lambda image: whole(predict, image, 2 ** (settings.levels - 1)),
        "windows": lambda image: sliding(predict, image, windows),
    }


def predictor(config: UNet3DConfig, params: Any, budget: str | int | None = None) -> Predict:
    """The network within a budget of device bytes, as `memplan.jit` takes it."""
    run = memplan.jit(forward(config), budget=budget)
    return lambda images: run(params, images)


def forward(config: UNet3DConfig) -> Callable[[Any, Any], Any]:
    """(params, images [B, X, Y, Z, M]) -> logits [B, X, Y, Z, C]."""

    def apply(params: Any, images: Any) -> Any:
        return UNet3D(config).apply({"params": params}, images)

    return apply


def score(settings: Settings, infer: Callable[[np.ndarray], np.ndarray]) -> Scores:
    """Hard Dice over phantoms that no training sees, half of them with the marker on either side."""
    dice, lesion = [], []
    for number in range(settings.held_out):
        volume = draw(settings.size, HELD_OUT, number).volume
        found = infer(volume.image).argmax(-1)
        dice.append(hard_dice(found, volume.label, len(LABELS)))
        lesion.append(hard_dice(found > 0, volume.label > 0, 2)[1])
    return Scores(tuple(map(float, np.nanmean(dice, 0))), float(np.mean(lesion)))
