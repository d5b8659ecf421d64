"""Training with a large global batch within a budget: scaling rules, steps, and accuracy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import memplan
from experiments.applications.large_batch.shapes import SHAPES, SIDE, draw
from models.resnet import ResNet, ResNetConfig
from models.train import TrainState, resnet_step

TRAINING_SEED, HELD_OUT_SEED = 0, 1
EXAMINED_AT_ONCE = 512
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4


@dataclass(frozen=True)
class Settings:
    """The settings that all trainings share."""

    budget: str = "16MiB"  # device bytes of a step, for every batch
    examples: int = 8192
    held_out: int = 4096
    epochs: int = 10
    warmup_epochs: int = 2  # of the `epochs`, if the rule has a warm-up
    base_batch: int = 32  # the batch that the base rates belong to
    filters: int = 8


def sgd(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(WEIGHT_DECAY, matrices), optax.sgd(rate, momentum=MOMENTUM)
    )


def lars(rate: optax.Schedule) -> optax.GradientTransformation:
    """LARS (You et al., arXiv:1708.03888); plain SGD without decay for biases and norms."""
    return optax.lars(rate, WEIGHT_DECAY, matrices, trust_ratio_mask=matrices, momentum=MOMENTUM)


def matrices(params: Any) -> Any:
    """True for parameters with two or more dimensions: not for biases, nor scales of norms."""
    return jax.tree.map(lambda leaf: np.ndim(leaf) >= 2, params)


class ScalingRule(NamedTuple):
    """An optimizer, and how its learning rate grows with the batch."""

    optimizer: Callable[[optax.Schedule], optax.GradientTransformation]
    base_rate: float  # at the base batch
    # Exponent of the growth, which has a warm-up; None: the base rate for every batch, no warm-up.
    power: float | None

    def rate(self, settings: Settings, batch: int) -> optax.Schedule:
        """Warm-up and scaling of Goyal et al., arXiv:1706.02677, section 2; cosine decay to 0."""
        epoch = settings.examples // batch
        if self.power is None:
            return optax.cosine_decay_schedule(self.base_rate, settings.epochs * epoch)
        peak = self.base_rate * (batch / settings.base_batch) ** self.power
        warm, steps = settings.warmup_epochs * epoch, settings.epochs * epoch
        return optax.warmup_cosine_decay_schedule(self.base_rate, peak, warm, steps)


RULES = {
    "unscaled": ScalingRule(sgd, 0.025, None),
    "linear": ScalingRule(sgd, 0.025, 1.0),
    "LARS, linear": ScalingRule(lars, 2.0, 1.0),
    "LARS, root": ScalingRule(lars, 2.0, 0.5),
}


def train(
    name: str, batch: int, seeds: Sequence[int], settings: Settings
) -> Iterator[dict[str, Any]]:
    """Train once per seed of weights and order; the step is compiled once for all seeds."""
    config = ResNetConfig(14, settings.filters, len(SHAPES))
    optimizer = RULES[name].optimizer(RULES[name].rate(settings, batch))
    step, args = resnet_step(SIDE, batch, config=config, optimizer=optimizer)
    planned = memplan.jit(step, budget=settings.budget, donate_argnums=0).plan(*args)
    run, report = planned.compile(), planned.report
    images = draw(settings.examples, TRAINING_SEED)
    held_out = draw(settings.held_out, HELD_OUT_SEED)
    for seed in seeds:
        _, (state, _) = resnet_step(
            SIDE, 1, config=config, optimizer=optimizer, concrete=True, seed=seed
        )
        for examples in batches(*images, batch, settings.epochs, seed):
            state, _ = run(state, examples)
        yield {
            "way": name, "batch": batch, "seed": seed, "steps": int(state.step),
            "plain_bytes": report.baseline_peak_bytes, "device_bytes": report.compiled_peak_bytes,
            "accuracy": accuracy(ResNet(config), state, *held_out),
        }  # fmt: skip


def batches(
    images: np.ndarray, labels: np.ndarray, batch: int, epochs: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Each epoch in a new order that depends on the seed; an incomplete last batch is dropped."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(labels))
        for start in range(0, len(labels) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield {"image": images[chosen], "label": labels[chosen]}


def accuracy(network: Any, state: TrainState, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of the images classified correctly. NaN weights predict the first class everywhere."""
    answers, weights = [], {"params": state.params, "batch_stats": state.batch_stats}
    answer = jax.jit(lambda weights, images: network.apply(weights, images).argmax(-1))
    for start in range(0, len(labels), EXAMINED_AT_ONCE):
        answers.append(answer(weights, images[start : start + EXAMINED_AT_ONCE]))
    return float(np.mean(np.concatenate(answers) == labels))
