"""Skin lesions as the ISIC archive hands them out (Codella et al., arXiv:1902.03368; Tschandl et al., 2018).

Photographs `ISIC_0000000.jpg` of any size; beside them a table of classes, `image,MEL,NV,...` with a single 1.0 a row
(ISIC 2018 task 3 and ISIC 2019), and masks `ISIC_0000000_segmentation.png`, 255 on the lesion and 0 elsewhere.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.applications.skin_lesions.photographs import opened
from experiments.datasets import DatasetError

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "AK", "BKL", "DF", "VASC", "SCC")
"""What a column may be called: melanoma, nevus, basal cell carcinoma, ..."""
UNKNOWN = "UNK"
"""Column of ISIC 2019 for lesions of no class; no photograph to train on may be in it."""


@dataclass(frozen=True)
class Lesion:
    """One photograph, for example ISIC_0024306; `label` is a position in the data set's `classes`."""

    name: str
    image: Path
    mask: Path
    label: int


@dataclass(frozen=True)
class Dataset:
    classes: tuple[str, ...]
    lesions: tuple[Lesion, ...]


def open_dataset(images: Path, masks: Path, truth: Path) -> Dataset:
    """Read the table `truth` and see that every photograph and mask is there; no pixel is read yet.

    Raises:
      DatasetError: the table is no such table, a lesion has no or an unknown class, or a file is missing.
    """
    rows = _rows(truth)
    classes = tuple(column for column in rows[0] if column not in ("image", UNKNOWN))
    return Dataset(classes, tuple(_lesion(images, masks, truth, row, classes) for row in rows))


def mask_of(lesion: Lesion) -> Image.Image:
    """The mask as it is stored, of the size of its photograph, with no values but 0 and 255.

    Raises:
      DatasetError: damaged, of another size, or not a mask.
    """
    mask, photograph = opened(lesion.mask), opened(lesion.image)
    if mask.size != photograph.size:
        raise DatasetError(
            lesion.mask,
            f"the mask has {mask.size[0]} x {mask.size[1]} pixels, its photograph {lesion.image} has "
            f"{photograph.size[0]} x {photograph.size[1]}",
            "Check that the two belong together and neither was resized alone.",
        )
    values = np.unique(np.asarray(mask))
    if mask.mode != "L" or not np.isin(values, (0, 255)).all():
        raise DatasetError(
            lesion.mask,
            f"mode {mask.mode} with values {values[:5].tolist()}, not grey with 0 and 255 alone",
            "Masks are PNG files, 255 on the lesion; smoothing or JPEG would add other values.",
        )
    return mask


def _rows(truth: Path) -> list[dict[str, str]]:
    """The rows of the table, every one with the same known columns."""
    try:
        with truth.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DatasetError(truth, f"cannot be read ({error.strerror})", "Point to the ground truth's CSV.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(truth, f"not a CSV table ({error})", "Restore the original file.") from error
    columns = list(rows[0]) if rows else []
    strange = [column for column in columns[1:] if column not in (*CLASSES, UNKNOWN)]
    if len(columns) < 3 or columns[0] != "image" or strange:
        found = f"unknown columns {strange}" if strange else f"columns {columns}"
        raise DatasetError(
            truth, f"{len(rows)} rows with {found}", f"ISIC's begins image,MEL,NV; known are {', '.join(CLASSES)}."
        )
    return rows


def _lesion(images: Path, masks: Path, truth: Path, row: Mapping[str, str], classes: tuple[str, ...]) -> Lesion:
    name = row["image"]
    image, mask = images / f"{name}.jpg", masks / f"{name}_segmentation.png"
    for file in (image, mask):
        if not file.is_file():
            raise DatasetError(file, f"listed in {truth}, but missing", "Unpack the archive again, to its end.")
    return Lesion(name, image, mask, _label(truth, row, classes))


def _label(truth: Path, row: Mapping[str, str], classes: tuple[str, ...]) -> int:
    """The position of the only 1.0 among zeros."""
    cells = [row[column] for column in classes]
    try:
        values = [float(cell) for cell in cells]
    except (TypeError, ValueError):
        values = []
    if sorted(values) != [0.0] * (len(classes) - 1) + [1.0]:
        told = dict(zip(classes, cells, strict=True))
        raise DatasetError(
            truth, f"{row['image']} has no known class: {told}", "Each row has one 1.0 among zeros; leave others out."
        )
    return values.index(1.0)
