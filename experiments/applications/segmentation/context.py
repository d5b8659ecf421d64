"""Phantoms whose labels depend on distant context: a far-away marker decides a lesion's class.

The lesion is in the front of the head and looks the same in both classes; the marker is in the back
and is bright or dark. At least half a volume lies between them, so no cube with half the volume's
side contains voxels of both.
"""

from dataclasses import dataclass

import numpy as np

from experiments.applications.segmentation.decathlon import Volume
from experiments.applications.segmentation.phantoms import ellipsoid, smooth

LABELS = ("background", "lesion, marker bright", "lesion, marker dark")
BRIGHT, DARK = 1, 2
LESION, MARKER = 4.0, {BRIGHT: 8.0, DARK: -8.0}
"""Mean intensity above that of the tissue, in standard deviations of the tissue."""


@dataclass(frozen=True, eq=False)
class Head:
    """One phantom."""

    # Image float32 [size, size, size, 1], label int32 [size, size, size]; markers are background.
    volume: Volume
    marker: np.ndarray  # bool [size, size, size]


def draw(size: int, seed: int, number: int) -> Head:
    """Phantom `number` of a seed's sequence; even ones have a bright marker, odd a dark one."""
    if size < 16:
        raise ValueError(f"a phantom with a marker needs at least 16 voxels a side; got {size}.")
    random = np.random.default_rng([seed, number])
    kind = DARK if number % 2 else BRIGHT
    head = ellipsoid(size, np.full(3, (size - 1) / 2), size * np.array([0.47, 0.44, 0.42]))
    lesion = _blob(size, (0.15, random.uniform(0.4, 0.6), 0.5), (0.11, 0.28, 0.28), random)
    marker = _blob(size, (0.84, random.uniform(0.4, 0.6), 0.5), (0.06, 0.2, 0.2), random)
    image = 0.5 * smooth(size, random) + 0.5 * random.standard_normal(head.shape, np.float32)
    image[lesion] += LESION
    image[marker] += MARKER[kind]
    image = np.where(head, image, 0).astype(np.float32)
    label = np.where(lesion & head, kind, 0).astype(np.int32)
    return Head(Volume(image[..., None], label), marker & head)


Place = tuple[float, float, float]
"""Shares of the side along x, y and z."""


def _blob(size: int, middle: Place, radii: Place, random: np.random.Generator) -> np.ndarray:
    """An ellipsoid near `middle` with at most these radii; along x it moves least."""
    off = random.uniform(-1, 1, 3) * np.array([0.01, 0.03, 0.03])
    return ellipsoid(
        size,
        size * (np.array(middle) + off) - 0.5,
        size * np.array(radii) * random.uniform(0.8, 1, 3),
    )
