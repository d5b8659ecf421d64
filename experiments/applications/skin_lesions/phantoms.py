"""Synthetic skin lesions in the format of the ISIC archive, in place of real ones.

A lesion is a blob on shaded skin with hairs. Its class determines the typical colours, how ragged
and how soft the border is, and how many dark spots there are. All of these vary within a class, so
classes overlap. There is no patient and no medical content.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from experiments.applications.skin_lesions.isic import Dataset, open_dataset

IMAGES = "ISIC_Training_Input"
MASKS = "ISIC_Training_GroundTruth"
TRUTH = "ISIC_Training_GroundTruth.csv"
SKIN = np.array([224, 182, 160])
FIRST_NUMBER = 24306  # as in ISIC 2018 task 3


class Look(NamedTuple):
    """The appearance of lesions of a class."""

    share: float  # of all lesions
    inner: tuple[int, int, int]  # usual red, green and blue of the middle, 0 to 255
    outer: tuple[int, int, int]  # of the rim
    ragged: float  # how far the border leaves an ellipse, as a share of the radius
    fading: float  # width of the border, likewise
    spots: int  # dark ones, at most


LOOKS = {
    "MEL": Look(0.20, (70, 45, 45), (120, 80, 70), 0.30, 0.10, 6),
    "NV": Look(0.30, (120, 75, 55), (145, 100, 80), 0.05, 0.10, 0),
    "BCC": Look(0.12, (205, 130, 130), (195, 115, 115), 0.12, 0.25, 3),
    "AKIEC": Look(0.10, (200, 110, 90), (210, 145, 125), 0.28, 0.30, 0),
    "BKL": Look(0.12, (150, 115, 80), (130, 95, 70), 0.15, 0.03, 5),
    "DF": Look(0.08, (220, 180, 165), (150, 100, 85), 0.06, 0.20, 0),
    "VASC": Look(0.08, (160, 40, 70), (180, 70, 90), 0.10, 0.05, 2),
}


def write_phantoms(root: Path, lesions: int, seed: int = 0) -> Dataset:
    """Write `lesions` lesions to the new folder `root`; the same arguments give the same bytes."""
    for folder in (root, root / IMAGES, root / MASKS):
        folder.mkdir()
    with (root / TRUTH).open("w", newline="") as table:
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(["image", *LOOKS])
        for number in range(FIRST_NUMBER, FIRST_NUMBER + lesions):
            kind, image, mask = draw(np.random.default_rng([seed, number - FIRST_NUMBER]))
            Image.fromarray(image).save(root / IMAGES / f"ISIC_{number:07d}.jpg", quality=90)
            Image.fromarray(mask).save(root / MASKS / f"ISIC_{number:07d}_segmentation.png")
            rows.writerow([f"ISIC_{number:07d}", *(float(name == kind) for name in LOOKS)])
    return open_dataset(root / IMAGES, root / MASKS, root / TRUTH)


def draw(random: np.random.Generator) -> tuple[str, np.ndarray, np.ndarray]:
    """A class, a photograph uint8 [height, width, 3], its mask uint8 [height, width], 0 or 255."""
    kind = str(random.choice(list(LOOKS), p=[look.share for look in LOOKS.values()]))
    look, height = LOOKS[kind], int(random.integers(96, 160))
    width = round(height * random.choice((1.0, 4 / 3, 3 / 2)))
    # Depth of a pixel in the lesion, in radii: 1 in the middle, 0 on the border, negative outside.
    ragged, radius = look.ragged * random.uniform(0.5, 1.2), height * random.uniform(0.2, 0.38)
    rows, columns = np.mgrid[:height, :width]
    y = (rows - height / 2 - random.normal(0, 0.04 * height)) / radius
    x = columns - width / 2 - random.normal(0, 0.04 * height)
    x /= radius * random.uniform(0.8, 1.2)
    waves = np.arange(2, 9)
    heights = random.normal(0, 1, waves.size) / np.sqrt(waves)
    phases = random.uniform(0, 2 * np.pi, waves.size)
    ripples = heights * np.cos(np.arctan2(y, x)[..., None] * waves + phases)
    border = 1 + ragged * 0.5 * ripples.sum(-1)
    depth = border - np.hypot(x, y)
    fading = max(look.fading * random.uniform(0.5, 1.5), 0.02)
    cover = np.clip(0.5 + depth / fading, 0, 1)[..., None]
    # The lesion's own colours, spots included.
    inner, outer = (
        np.array(colour) + random.normal(0, 10) + random.normal(0, 7, 3)
        for colour in (look.inner, look.outer)
    )
    middle = np.clip(depth, 0, 1)[..., None]
    lesion = middle * inner + (1 - middle) * outer
    for _ in range(random.integers(look.spots + 1)):
        deep = np.argwhere(depth > 0.1)
        at = deep[random.integers(len(deep))] if len(deep) else (0, 0)
        spot = np.hypot(rows - at[0], columns - at[1]) < random.uniform(0.02, 0.05) * height
        lesion[spot] *= 0.55
    image = cover * lesion + (1 - cover) * (SKIN + random.normal(0, 8, 3))
    photograph = _photograph(image, random)
    return kind, photograph, np.where(depth > 0, 255, 0).astype(np.uint8)


def _photograph(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Add uneven light, noise and up to five dark hairs; returns uint8."""
    height, width, _ = image.shape
    y, x = np.mgrid[-0.5 : 0.5 : height * 1j, -0.5 : 0.5 : width * 1j]
    slope = random.normal(0, 0.08, 2)
    image = image * (random.uniform(0.9, 1.05) + slope[0] * y + slope[1] * x)[..., None]
    image += random.normal(0, 4, image.shape)
    picture = Image.fromarray(np.clip(np.rint(image), 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(random.integers(6)):
        ends = random.uniform(0, 1, (2, 2)) * picture.size
        pen.line([tuple(end) for end in ends], fill=(60, 45, 40), width=1)
    return np.asarray(picture)
