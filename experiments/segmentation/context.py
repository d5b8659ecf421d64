"""Phantoms whose labels cannot be told from nearby: a lesion's class is the side of the head where a far marker lies.

The lesion lies in the front of the head and looks the same in both classes; the marker lies in the back, left or right.
At least half a volume is between the two, so no cube of half the volume's side ever holds voxels of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.segmentation.decathlon import Volume
from experiments.segmentation.phantoms import ellipsoid, smooth

LABELS = ("background", "lesion, marker left", "lesion, marker right")
LEFT, RIGHT = 1, 2
TISSUE, LESION, MARKER = 0.0, 4.0, -6.0
"""Mean intensity, in standard deviations of the tissue's."""


@dataclass(frozen=True, eq=False)
class Head:
    """One phantom.

    Attributes:
      volume: image float32 [size, size, size, 1], label int32 [size, size, size]; the marker counts as background.
      marker: bool [size, size, size].
    """

    volume: Volume
    marker: np.ndarray


def draw(size: int, seed: int, number: int) -> Head:
    """Phantom `number` of the sequence that `seed` begins; even ones have the marker on the left, others on the right.

    Raises:
      ValueError: below 16 voxels a side the marker is smaller than a voxel.
    """
    if size < 16:
        raise ValueError(f"a phantom with a marker needs at least 16 voxels a side; got {size}.")
    random = np.random.default_rng([seed, number])
    side = RIGHT if number % 2 else LEFT
    head = ellipsoid(size, np.full(3, (size - 1) / 2), size * np.array([0.47, 0.44, 0.42]))
    lesion = _blob(size, (0.15, random.uniform(0.4, 0.6), 0.5), (0.09, 0.18, 0.18), random)
    marker = _blob(size, (0.82, 0.7 if side == RIGHT else 0.3, 0.5), (0.06, 0.12, 0.18), random)
    image = TISSUE + 0.5 * smooth(size, random) + 0.5 * random.standard_normal(head.shape, np.float32)
    image[lesion] += LESION
    image[marker] += MARKER
    image = np.where(head, image, 0).astype(np.float32)
    label = np.where(lesion & head, side, 0).astype(np.int32)
    return Head(Volume(image[..., None], label), marker & head)


Place = tuple[float, float, float]
"""Shares of the side along x, y and z."""


def _blob(size: int, middle: Place, radii: Place, random: np.random.Generator) -> np.ndarray:
    """An ellipsoid about `middle`, a little off, along x the least, and of at most these radii."""
    off = random.uniform(-1, 1, 3) * np.array([0.01, 0.03, 0.03])
    return ellipsoid(size, size * (np.array(middle) + off) - 0.5, size * np.array(radii) * random.uniform(0.8, 1, 3))
