"""Made-up skin lesions in the very format of the ISIC archive, for wherever the real ones cannot be had.

    python -m experiments.applications.skin_lesions.phantoms ROOT --lesions 64 --seed 0

A blob on shaded skin with hairs; the class decides its usual colours, how ragged its border is, how the border fades
and how many dark spots it has. All of these vary within a class, so that classes overlap. No patient, no medical
content.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from experiments.applications.skin_lesions.isic import Dataset, open_dataset

IMAGES, MASKS, TRUTH = "ISIC_Training_Input", "ISIC_Training_GroundTruth", "ISIC_Training_GroundTruth.csv"
SKIN = np.array([224, 182, 160])
FIRST_NUMBER = 24306  # as in ISIC 2018 task 3


@dataclass(frozen=True)
class Look:
    """What lesions of a class look like.

    Attributes:
      share: of all lesions.
      inner, outer: usual red, green and blue of the middle and the rim, 0 to 255.
      ragged: how far the border leaves an ellipse, as a share of the radius.
      fading: width of the border, likewise.
      spots: dark ones, at most.
    """

    share: float
    inner: tuple[int, int, int]
    outer: tuple[int, int, int]
    ragged: float
    fading: float
    spots: int


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
    """Write so many lesions to the new folder `root`: photographs, masks and the table of classes.

    Everything is written beside `root` and renamed last. The same arguments give the same bytes; lesion i depends on
    `seed` and i alone.

    Raises:
      FileExistsError: `root` exists.
      ValueError: fewer than one lesion, or a negative seed.
    """
    if lesions < 1 or seed < 0:
        raise ValueError(f"phantoms need at least 1 lesion and a seed of at least 0; got {lesions} and {seed}.")
    if root.exists():
        raise FileExistsError(f"{root} exists; nothing was overwritten. Choose another folder, or remove it first.")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as scratch:
        draft = Path(scratch) / root.name
        _write(draft, lesions, seed)
        os.rename(draft, root)
    return open_dataset(root / IMAGES, root / MASKS, root / TRUTH)


def draw(random: np.random.Generator) -> tuple[str, np.ndarray, np.ndarray]:
    """A class, a photograph uint8 [height, width, 3] of some size, and its mask uint8 [height, width], 0 or 255."""
    kind = random.choice(list(LOOKS), p=[look.share for look in LOOKS.values()])
    look, height = LOOKS[kind], int(random.integers(96, 160))
    width = round(height * random.choice((1.0, 4 / 3, 3 / 2)))
    depth = _depth(height, width, look.ragged * random.uniform(0.5, 1.2), random)
    cover = np.clip(0.5 + depth / max(look.fading * random.uniform(0.5, 1.5), 0.02), 0, 1)[..., None]
    lesion = _colours(look, depth, random)
    skin = SKIN + random.normal(0, 8, 3)
    image = cover * lesion + (1 - cover) * skin
    image = image * _light(height, width, random)[..., None] + random.normal(0, 4, image.shape)
    photograph = _hairy(Image.fromarray(np.clip(np.rint(image), 0, 255).astype(np.uint8)), random)
    return str(kind), np.asarray(photograph), np.where(depth > 0, 255, 0).astype(np.uint8)


def _depth(height: int, width: int, ragged: float, random: np.random.Generator) -> np.ndarray:
    """How deep inside the lesion a pixel lies, in radii: 1 in the middle, 0 on the border, below 0 outside."""
    radius = height * random.uniform(0.2, 0.38)
    y, x = np.mgrid[:height, :width]
    y = (y - height / 2 - random.normal(0, 0.04 * height)) / radius
    x = (x - width / 2 - random.normal(0, 0.04 * height)) / (radius * random.uniform(0.8, 1.2))
    angle, waves = np.arctan2(y, x), np.arange(2, 9)
    heights, phases = random.normal(0, 1, waves.size) / np.sqrt(waves), random.uniform(0, 2 * np.pi, waves.size)
    border = 1 + ragged * 0.5 * (heights * np.cos(angle[..., None] * waves + phases)).sum(-1)
    return border - np.hypot(x, y)


def _colours(look: Look, depth: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The lesion's own colour everywhere, float [height, width, 3], its spots included."""
    inner, outer = (
        np.array(colour) + random.normal(0, 10) + random.normal(0, 7, 3) for colour in (look.inner, look.outer)
    )
    middle = np.clip(depth, 0, 1)[..., None]
    colours = middle * inner + (1 - middle) * outer
    y, x = np.mgrid[: depth.shape[0], : depth.shape[1]]
    for _ in range(random.integers(look.spots + 1)):
        deep = np.argwhere(depth > 0.1)
        at = deep[random.integers(len(deep))] if len(deep) else (0, 0)
        near = np.hypot(y - at[0], x - at[1]) < random.uniform(0.02, 0.05) * depth.shape[0]
        colours[near] *= 0.55
    return colours


def _light(height: int, width: int, random: np.random.Generator) -> np.ndarray:
    """Brightness that falls slowly in one direction, float [height, width] about 1."""
    y, x = np.mgrid[-0.5 : 0.5 : height * 1j, -0.5 : 0.5 : width * 1j]
    slope = random.normal(0, 0.08, 2)
    return random.uniform(0.9, 1.05) + slope[0] * y + slope[1] * x


def _hairy(photograph: Image.Image, random: np.random.Generator) -> Image.Image:
    """The photograph with up to five dark hairs across."""
    pen, size = ImageDraw.Draw(photograph), np.array(photograph.size)
    for _ in range(random.integers(6)):
        ends = random.uniform(0, 1, (2, 2)) * size
        pen.line([tuple(end) for end in ends], fill=(60, 45, 40), width=1)
    return photograph


def _write(root: Path, lesions: int, seed: int) -> None:
    for folder in (IMAGES, MASKS):
        (root / folder).mkdir(parents=True)
    table = io.StringIO(newline="")
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["image", *LOOKS])
    for number in range(lesions):
        kind, image, mask = draw(np.random.default_rng([seed, number]))
        name = f"ISIC_{FIRST_NUMBER + number:07d}"
        Image.fromarray(image).save(root / IMAGES / f"{name}.jpg", quality=90)
        Image.fromarray(mask).save(root / MASKS / f"{name}_segmentation.png")
        rows.writerow([name, *(float(one == kind) for one in LOOKS)])
    (root / TRUTH).write_text(table.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write made-up skin lesions in the layout of the ISIC archive.")
    parser.add_argument("root", type=Path, help="folder to create")
    parser.add_argument("--lesions", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        dataset = write_phantoms(options.root, options.lesions, options.seed)
    except (FileExistsError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.root}: {len(dataset.lesions)} lesions of {len(dataset.classes)} classes")


if __name__ == "__main__":
    main()
