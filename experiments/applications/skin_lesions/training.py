"""Two tasks trained within a budget on photographs that grain decodes while the step runs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grain
import jax
import numpy as np
import optax

from experiments.applications.skin_lesions.isic import Lesion, mask_pixels, pixels
from models.resnet import ResNet, ResNetConfig
from models.train import Batch, Built, Step, TrainState, resnet_step, unet2d_step
from models.unet2d import UNet2D, UNet2DConfig

# ImageNet's red, green and blue, as shares of full brightness.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
EXAMINED_AT_ONCE = 64


@dataclass(frozen=True)
class Task:
    """What to learn, and within which budget."""

    name: str
    side: int  # pixels of the network's input
    batch: int
    steps: int
    budget: str | int | None  # device bytes of a step, as `memplan.jit` takes them
    network: Any
    built: Built
    label: Callable[[Lesion], np.ndarray]  # int32, a class or [side, side] of them
    # (labels, answers), both [examples, ...] -> scores from 0 to 1 by name
    score: Callable[[np.ndarray, np.ndarray], dict[str, float]]


def classification(
    classes: int,
    budget: str | None = "14MiB",
    side: int = 64,
    batch: int = 32,
    steps: int = 300,
    filters: int = 8,
) -> Task:
    config = ResNetConfig(14, filters, classes)
    built = resnet_step(side, batch, config=config, optimizer=_sgd(steps), concrete=True)

    def label(lesion: Lesion) -> np.ndarray:
        return np.asarray(lesion.label, np.int32)

    return Task(
        "ResNet, classes",
        side,
        batch,
        steps,
        budget,
        ResNet(config),
        built,
        label,
        balanced_accuracy,
    )


def segmentation(
    budget: str | None = "20MiB",
    side: int = 64,
    batch: int = 8,
    steps: int = 100,
    filters: int = 8,
    levels: int = 3,
) -> Task:
    config = UNet2DConfig(levels, filters)
    built = unet2d_step(side, batch, config=config, optimizer=_sgd(steps), concrete=True)
    label = partial(mask_pixels, side=side)
    return Task("U-Net, masks", side, batch, steps, budget, UNet2D(config), built, label, overlaps)


def _sgd(steps: int) -> optax.GradientTransformation:
    """SGD whose rate warms up over a tenth of the steps and decays to 0 along a cosine."""
    return optax.sgd(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, steps // 10, steps),
        momentum=0.9,
        nesterov=True,
    )


def batches(task: Task, lesions: Sequence[Lesion], seed: int = 0) -> Iterator[Any]:
    """Endless batches: "image" float32 [batch, side, side, 3], and "label".

    `seed` determines the order and the augmentation.
    """
    examples = (
        grain.MapDataset.source(list(lesions))
        .seed(seed)
        .shuffle()
        .repeat()
        .map(partial(prepared, task))
    )
    whole = examples.random_map(turned).batch(task.batch, drop_remainder=True).map(standardized)
    return iter(whole.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def prepared(task: Task, lesion: Lesion) -> Batch:
    return {"image": pixels(lesion, task.side), "label": task.label(lesion)}


def turned(example: Batch, random: np.random.Generator) -> Batch:
    """Rotate by quarter turns and perhaps mirror; a label with spatial axes follows its image."""
    quarters, step = int(random.integers(4)), -1 if random.integers(2) else 1
    return {
        name: np.rot90(part, quarters)[:, ::step] if np.ndim(part) else part
        for name, part in example.items()
    }


def standardized(batch: Batch) -> Batch:
    return {**batch, "image": (np.float32(batch["image"]) / np.float32(255) - MEAN) / DEVIATION}


def descend(
    run: Step, state: TrainState, batches: Iterator[Any], steps: int
) -> tuple[TrainState, np.ndarray]:
    losses = []
    for batch in itertools.islice(batches, steps):
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    return state, np.array(jax.device_get(losses))


def scores(task: Task, state: TrainState, lesions: Sequence[Lesion]) -> dict[str, float]:
    """Scores of the network's predictions against the labels of lesions."""
    weights, answers = {"params": state.params, "batch_stats": state.batch_stats}, []
    answer = jax.jit(lambda weights, images: task.network.apply(weights, images).argmax(-1))
    for start in range(0, len(lesions), EXAMINED_AT_ONCE):
        images = [pixels(lesion, task.side) for lesion in lesions[start : start + EXAMINED_AT_ONCE]]
        answers.append(answer(weights, standardized({"image": np.stack(images)})["image"]))
    return task.score(np.stack([task.label(lesion) for lesion in lesions]), np.concatenate(answers))


def balanced_accuracy(labels: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """Mean recall over the classes in `labels`; both arguments are integers [examples]."""
    recalls = [np.mean(answers[labels == label] == label) for label in np.unique(labels)]
    return {"balanced accuracy": float(np.mean(recalls))}


def overlaps(labels: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """Mean Dice and Jaccard of 0-1 masks [examples, ...]; 1 where both masks are empty."""
    masks, answers = (maps.reshape(len(maps), -1) > 0 for maps in (labels, answers))
    both, either = (masks & answers).sum(1), (masks | answers).sum(1)
    jaccard = np.where(either == 0, 1, both / np.maximum(either, 1))
    return {"Dice": float((2 * jaccard / (1 + jaccard)).mean()), "Jaccard": float(jaccard.mean())}
