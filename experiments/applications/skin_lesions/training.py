"""Training a classifier and a segmentation of skin lesions within a budget, and exporting the classifier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax import export

import memplan
from experiments.applications.skin_lesions.preparing import Prepare, classified, outlined, standardized_pixels
from memplan.report.model import Report
from models.resnet import ResNet, ResNetConfig
from models.train import Built, TrainState, resnet_step, unet2d_step
from models.unet2d import UNet2D, UNet2DConfig

Predict = Callable[[Any], Any]
"""uint8 [batch, side, side, 3] -> what the task asks for, of each image."""


@dataclass(frozen=True)
class Settings:
    """Sizes of a training. The rate rises over a tenth of the steps and falls to zero by half a cosine.

    Attributes:
      side: pixels along each side of what the network sees.
      budget: device bytes that the step may take, as `memplan.jit` takes them.
    """

    side: int
    batch: int
    steps: int
    filters: int
    rate: float
    budget: str | int | None

    @property
    def optimizer(self) -> optax.GradientTransformation:
        rate = optax.warmup_cosine_decay_schedule(0.0, self.rate, self.steps // 10, self.steps)
        return optax.sgd(rate, momentum=0.9, nesterov=True)


CLASSIFIER = Settings(side=64, batch=32, steps=300, filters=8, rate=0.1, budget="14MiB")
OUTLINER = Settings(side=64, batch=8, steps=100, filters=8, rate=0.1, budget="20MiB")
DEPTH, LEVELS = 14, 3


@dataclass(frozen=True)
class Task:
    """What is learnt: the step with its first state, how a lesion is prepared, and what a state then predicts."""

    settings: Settings
    built: Built
    prepare: Prepare
    predict: Callable[[TrainState], Predict]


def classification(settings: Settings, classes: Sequence[str], depth: int = DEPTH, seed: int = 0) -> Task:
    """A ResNet; predicts {class: share float32 [batch]}."""
    config = ResNetConfig(depth, settings.filters, len(classes))
    built = resnet_step(
        settings.side, settings.batch, config=config, optimizer=settings.optimizer, concrete=True, seed=seed
    )

    def predict(state: TrainState) -> Predict:
        weights = {"params": state.params, "batch_stats": state.batch_stats}

        def shares(images: Any) -> dict[str, Any]:
            logits: Any = ResNet(config).apply(weights, standardized_pixels(images))
            return dict(zip(classes, jax.nn.softmax(logits).T, strict=True))

        return shares

    return Task(settings, built, classified(settings.side), predict)


def segmentation(settings: Settings, levels: int = LEVELS, seed: int = 0) -> Task:
    """A U-Net; predicts bool [batch, side, side], true on the lesion."""
    config = UNet2DConfig(levels, settings.filters)
    built = unet2d_step(
        settings.side, settings.batch, config=config, optimizer=settings.optimizer, concrete=True, seed=seed
    )

    def predict(state: TrainState) -> Predict:
        def mask(images: Any) -> Any:
            logits: Any = UNet2D(config).apply({"params": state.params}, standardized_pixels(images))
            return logits[..., 1] > logits[..., 0]

        return mask

    return Task(settings, built, outlined(settings.side), predict)


def train(task: Task, batches: Iterable[Any]) -> tuple[TrainState, np.ndarray, Report]:
    """The state after all steps within the budget, the loss of each, float32 [steps], and the plan's report."""
    step, (state, batch) = task.built
    planned = memplan.jit(step, budget=task.settings.budget, donate_argnums=0).plan(state, batch)
    state, losses = descend(planned.compile(), state, itertools.islice(batches, task.settings.steps))
    return state, losses, planned.report


def descend(step: Callable[..., Any], state: TrainState, batches: Iterable[Any]) -> tuple[TrainState, np.ndarray]:
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, np.array(jax.device_get(losses))


def predicted(predict: Predict, images: np.ndarray, at_once: int) -> Any:
    """What `predict` makes of all images, a few at a time; arrays of numpy."""
    run = jax.jit(predict)
    parts = [jax.device_get(run(images[start : start + at_once])) for start in range(0, len(images), at_once)]
    return jax.tree.map(lambda *some: np.concatenate(some), *parts)


def exported(predict: Predict, side: int) -> bytes:
    """The program with its weights as StableHLO, for any batch, on CPUs and NVIDIA GPUs; `detector` reads it."""
    images = jax.ShapeDtypeStruct(export.symbolic_shape(f"batch, {side}, {side}, 3"), np.uint8)
    return bytes(export.export(jax.jit(predict), platforms=("cpu", "cuda"))(images).serialize())
