"""Training with a large global batch within a budget: which rate and optimizer, the steps, and the accuracy."""

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
    """What all trainings have in common."""

    budget: str = "16MiB"  # device bytes of a step, whatever the batch
    examples: int = 8192
    held_out: int = 4096
    epochs: int = 10
    warmup_epochs: int = 2  # of the `epochs`, where there is a warm-up
    base_batch: int = 32  # examples of one step that the base rates are for
    filters: int = 8


def sgd(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(WEIGHT_DECAY, matrices), optax.sgd(rate, momentum=MOMENTUM))


def lars(rate: optax.Schedule) -> optax.GradientTransformation:
    """You et al., arXiv:1708.03888; biases and norms move as by SGD, without decay."""
    return optax.lars(rate, WEIGHT_DECAY, matrices, trust_ratio_mask=matrices, momentum=MOMENTUM)


def matrices(params: Any) -> Any:
    """True for parameters of two dimensions or more: neither biases, nor scales and offsets of norms."""
    return jax.tree.map(lambda leaf: np.ndim(leaf) >= 2, params)


class Way(NamedTuple):
    """An optimizer, and how its rate grows with the batch."""

    optimizer: Callable[[optax.Schedule], optax.GradientTransformation]
    base_rate: float  # at the base batch
    power: float | None  # of the growth, after a warm-up; None: the base rate at every batch, without a warm-up

    def rate(self, settings: Settings, batch: int) -> optax.Schedule:
        """It falls to zero by half a cosine; warm-up and growth as in Goyal et al., arXiv:1706.02677, section 2."""
        epoch = settings.examples // batch
        if self.power is None:
            return optax.cosine_decay_schedule(self.base_rate, settings.epochs * epoch)
        peak = self.base_rate * (batch / settings.base_batch) ** self.power
        warm, steps = settings.warmup_epochs * epoch, settings.epochs * epoch
        return optax.warmup_cosine_decay_schedule(self.base_rate, peak, warm, steps)


WAYS = {
    "unscaled": Way(sgd, 0.025, None),
    "linear": Way(sgd, 0.025, 1.0),
    "LARS, linear": Way(lars, 2.0, 1.0),
    "LARS, root": Way(lars, 2.0, 0.5),
}


def train(name: str, batch: int, seeds: Sequence[int], settings: Settings) -> Iterator[dict[str, Any]]:
    """One training per seed of weights and order, and its accuracy; the step is compiled once for all."""
    config = ResNetConfig(14, settings.filters, len(SHAPES))
    optimizer = WAYS[name].optimizer(WAYS[name].rate(settings, batch))
    step, args = resnet_step(SIDE, batch, config=config, optimizer=optimizer)
    planned = memplan.jit(step, budget=settings.budget, donate_argnums=0).plan(*args)
    run, report = planned.compile(), planned.report
    images, held_out = draw(settings.examples, TRAINING_SEED), draw(settings.held_out, HELD_OUT_SEED)
    for seed in seeds:
        _, (state, _) = resnet_step(SIDE, 1, config=config, optimizer=optimizer, concrete=True, seed=seed)
        for examples in batches(*images, batch, settings.epochs, seed):
            state, _ = run(state, examples)
        yield {
            "way": name, "batch": batch, "seed": seed, "steps": int(state.step),
            "plain_bytes": report.baseline_peak_bytes, "device_bytes": report.compiled_peak_bytes,
            "accuracy": accuracy(ResNet(config), state, *held_out),
        }  # fmt: skip


def batches(images: np.ndarray, labels: np.ndarray, batch: int, epochs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Every epoch in another order, the same for one seed; what is left after the last whole batch is left out."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(labels))
        for start in range(0, len(labels) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield {"image": images[chosen], "label": labels[chosen]}


def accuracy(network: Any, state: TrainState, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of the images told right. Weights that are not numbers tell the first class everywhere."""
    told, weights = [], {"params": state.params, "batch_stats": state.batch_stats}
    tell = jax.jit(lambda weights, images: network.apply(weights, images).argmax(-1))
    for start in range(0, len(labels), EXAMINED_AT_ONCE):
        told.append(tell(weights, images[start : start + EXAMINED_AT_ONCE]))
    return float(np.mean(np.concatenate(told) == labels))
