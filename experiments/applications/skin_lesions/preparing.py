"""Batches of lesions, decoded and shrunk by grain's threads while the step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np
from PIL import Image

from experiments.applications.skin_lesions.isic import Lesion, mask_of
from experiments.applications.skin_lesions.photographs import DEVIATION, MEAN, pixels, square

Example = dict[str, np.ndarray]
Prepare = Callable[[Lesion], Example]


def classified(side: int) -> Prepare:
    """Lesion -> "image" uint8 [side, side, 3] and "label" int32, its class."""
    return lambda lesion: {"image": pixels(lesion.image, side), "label": np.asarray(lesion.label, np.int32)}


def outlined(side: int) -> Prepare:
    """Lesion -> "image" uint8 [side, side, 3] and "label" int32 [side, side], 1 on the lesion."""

    def prepare(lesion: Lesion) -> Example:
        mask = np.asarray(square(mask_of(lesion), side, Image.Resampling.NEAREST))
        return {"image": pixels(lesion.image, side), "label": (mask > 0).astype(np.int32)}

    return prepare


def training_batches(lesions: Sequence[Lesion], prepare: Prepare, batch: int, seed: int) -> Iterator[Any]:
    """Endless: every epoch in another order, each photograph turned and mirrored at random; all from `seed`.

    Batches are as `standardized`: "image" float32 [batch, side, side, 3], "label" as prepared. The lesions that are
    left over after an epoch's last whole batch begin the next one.
    """
    examples = grain.MapDataset.source(list(lesions)).seed(seed).shuffle().repeat().map(prepare)
    batches = examples.random_map(turned).batch(batch, drop_remainder=True).map(standardized)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def examples_of(lesions: Sequence[Lesion], prepare: Prepare) -> Example:
    """All of them in their order, in one batch, images in bytes."""
    prepared = [prepare(lesion) for lesion in lesions]
    return {name: np.stack([one[name] for one in prepared]) for name in prepared[0]}


def turned(example: Example, random: np.random.Generator) -> Example:
    """By any quarter turn and perhaps mirrored; a label that has a place turns with its image."""
    quarters, mirrored = int(random.integers(4)), bool(random.integers(2))

    def turn(part: np.ndarray) -> np.ndarray:
        if not np.ndim(part):
            return part
        part = np.rot90(part, quarters)
        return part[:, ::-1] if mirrored else part

    return {name: turn(part) for name, part in example.items()}


def standardized(batch: Example) -> Example:
    return {**batch, "image": standardized_pixels(batch["image"])}


def standardized_pixels(image: Any) -> Any:
    """Bytes [..., 3] to float32, each channel by ImageNet's mean and deviation; of numpy or of jax."""
    shift, scale = np.asarray(MEAN, np.float32), np.asarray(DEVIATION, np.float32)
    return (image.astype(np.float32) / np.float32(255) - shift) / scale
