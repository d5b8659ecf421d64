"""One training at one global batch: which rate and optimizer, the steps, and the accuracy afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from experiments.applications.large_batch.rates import Epochs, Schedule, at_least_matrices, scaled_rate, warmed_up
from experiments.applications.large_batch.shapes import SHAPES, SIDE, Images, draw
from memplan.parallel.meshes import mesh
from memplan.parallel.step import data_parallel
from models.resnet import ResNet, ResNetConfig
from models.train import Step, TrainState, resnet_step

TRAINING_SEED, TEST_SEED, VALIDATION_SEED = 0, 1, 2
EVALUATED_AT_ONCE = 512
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4


@dataclass(frozen=True)
class Settings:
    """What all trainings have in common.

    Attributes:
      examples: in the training set.
      test_examples: in the test set, and as many again to choose base rates by.
      base_batch: examples of one step that the base rates are for.
      warmup_epochs: of the `epochs`, where there is a warm-up.
      noise: standard deviation of the pixels' noise, see `shapes.draw`.
    """

    examples: int = 8192
    test_examples: int = 4096
    epochs: int = 10
    warmup_epochs: int = 2
    base_batch: int = 32
    noise: float = 0.3
    depth: int = 14
    filters: int = 8

    @property
    def model(self) -> ResNetConfig:
        return ResNetConfig(self.depth, self.filters, len(SHAPES))


@dataclass(frozen=True)
class Point:
    """One training. `base_rate` is for the base batch, whatever `global_batch` is; `seed` of weights and order."""

    way: str
    global_batch: int
    base_rate: float
    seed: int = 0
    devices: int = 1


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    steps: updates made.
    accuracy: share of the images not trained on that are told right, with the weights at the end.
    loss: cross-entropy in nats, mean over the last epoch; None where it was not finite.
    train_s: without compilation and evaluation.
    """

    steps: int
    accuracy: float
    loss: float | None
    train_s: float


def falling(rate: float, steps: int) -> Schedule:
    """From `rate` to zero by half a cosine."""
    return optax.cosine_decay_schedule(rate, steps)


def unscaled(settings: Settings, point: Point) -> optax.GradientTransformation:
    """The base rate, whatever the batch."""
    steps = Epochs(settings.examples, point.global_batch).steps(settings.epochs)
    return _sgd(falling(point.base_rate, steps))


def linear(settings: Settings, point: Point) -> optax.GradientTransformation:
    """The rate grown with the batch, after a warm-up from the base rate."""
    return _sgd(_warmed_up(settings, point, power=1.0))


def linear_lars(settings: Settings, point: Point) -> optax.GradientTransformation:
    """The same with LARS."""
    return _lars(_warmed_up(settings, point, power=1.0))


def root_lars(settings: Settings, point: Point) -> optax.GradientTransformation:
    """LARS whose rate grows with the square root of the batch."""
    return _lars(_warmed_up(settings, point, power=0.5))


WAYS: Mapping[str, Callable[[Settings, Point], optax.GradientTransformation]] = {
    "unscaled": unscaled,
    "linear": linear,
    "LARS, linear": linear_lars,
    "LARS, root": root_lars,
}


def _warmed_up(settings: Settings, point: Point, power: float) -> Schedule:
    epochs = Epochs(settings.examples, point.global_batch)
    warm = epochs.steps(settings.warmup_epochs)
    peak = scaled_rate(point.base_rate, settings.base_batch, point.global_batch, power)
    return warmed_up(falling(peak, epochs.steps(settings.epochs) - warm), warm, start=point.base_rate)


def _sgd(rate: Schedule) -> optax.GradientTransformation:
    decayed = optax.add_decayed_weights(WEIGHT_DECAY, at_least_matrices)
    return optax.chain(decayed, optax.sgd(rate, momentum=MOMENTUM))


def _lars(rate: Schedule) -> optax.GradientTransformation:
    """Biases and norms move as by SGD, without decay."""
    return optax.lars(
        rate,
        WEIGHT_DECAY,
        weight_decay_mask=at_least_matrices,
        trust_ratio_mask=at_least_matrices,
        momentum=MOMENTUM,
    )


class Trainer:
    """Trains one point after another, and compiles a step once for all seeds.

    Attributes:
      held_out: what the accuracy is measured on.
    """

    def __init__(self, settings: Settings, held_out_seed: int = TEST_SEED):
        self.settings = settings
        self.images = draw(settings.examples, TRAINING_SEED, settings.noise)
        self.held_out = draw(settings.test_examples, held_out_seed, settings.noise)
        self._compiled: dict[tuple[object, ...], Step] = {}
        self._predict = jax.jit(self._predicted)

    def train(self, point: Point) -> Outcome:
        state, losses, train_s = self.descend(point)
        loss = float(np.mean(losses[-Epochs(self.settings.examples, point.global_batch).steps_per_epoch :]))
        return Outcome(len(losses), self.accuracy(state), loss if math.isfinite(loss) else None, train_s)

    def descend(self, point: Point, turned: bool = False) -> tuple[TrainState, np.ndarray, float]:
        """The state after all steps, the loss of each, float32 [steps], and seconds.

        Args:
          turned: every batch in the opposite order, which is the same step but for roundings.
        """
        optimizer = WAYS[point.way](self.settings, point)
        step, (state, batch) = resnet_step(
            SIDE, point.global_batch, config=self.settings.model, optimizer=optimizer, concrete=True, seed=point.seed
        )
        run = self._step(point, step, state, batch)
        start, losses = time.perf_counter(), []
        for batch in batches(self.images, point.global_batch, self.settings.epochs, point.seed):
            state, metrics = run(state, {name: part[::-1] for name, part in batch.items()} if turned else batch)
            losses.append(metrics["loss"])
            if point.devices > 1:  # sums of two steps at once can wait for each other's threads on the CPU
                jax.block_until_ready(state)
        jax.block_until_ready(state)
        return state, np.array(jax.device_get(losses)), time.perf_counter() - start

    def _step(self, point: Point, step: Step, *args: Any) -> Step:
        """The compiled step of a point; seeds share it."""
        key = point.way, point.global_batch, point.base_rate, point.devices
        if key not in self._compiled:
            if point.devices > 1:
                step = data_parallel(step, mesh({"host": 1, "device": point.devices}))
            self._compiled[key] = jax.jit(step, donate_argnums=0).lower(*args).compile()
        return self._compiled[key]

    def accuracy(self, state: TrainState) -> float:
        """Share of the held-out images told right. Weights that are not numbers tell the first class everywhere."""
        params, batch_stats = jax.device_get((state.params, state.batch_stats))
        right = 0
        for start in range(0, len(self.held_out.label), EVALUATED_AT_ONCE):
            part = slice(start, start + EVALUATED_AT_ONCE)
            told = self._predict(params, batch_stats, self.held_out.image[part])
            right += int((np.asarray(told) == self.held_out.label[part]).sum())
        return right / len(self.held_out.label)

    def _predicted(self, params: Any, batch_stats: Any, image: jax.Array) -> jax.Array:
        logits = ResNet(self.settings.model).apply({"params": params, "batch_stats": batch_stats}, image)
        assert isinstance(logits, jax.Array)
        return logits.argmax(-1)


def batches(images: Images, global_batch: int, epochs: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Every epoch in another order, the same for one seed; what is left after the last whole batch is left out."""
    random = np.random.default_rng(seed)
    counted = Epochs(len(images.label), global_batch)
    for _ in range(epochs):
        order = random.permutation(counted.examples)
        for number in range(counted.steps_per_epoch):
            chosen = order[number * global_batch : (number + 1) * global_batch]
            yield {"image": images.image[chosen], "label": images.label[chosen]}
