"""Skin lesions in the format of the ISIC archive (Codella et al., 2019; Tschandl et al., 2018).

Photographs `ISIC_0000000.jpg` have any size. A table of classes, `image,MEL,NV,...`, has a single
1.0 in each row (ISIC 2018 task 3 and ISIC 2019). Masks `ISIC_0000000_segmentation.png` are 255 on
the lesion and 0 elsewhere.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from experiments.datasets import DatasetError

# Melanoma, nevus, basal cell carcinoma, ...
CLASSES = ("MEL", "NV", "BCC", "AKIEC", "AK", "BKL", "DF", "VASC", "SCC")
UNKNOWN = "UNK"  # ISIC 2019's column for lesions of no class, which training data must not have.


@dataclass(frozen=True)
class Lesion:
    """A photograph, for example ISIC_0024306; `label` is a position in the data set's `classes`."""

    image: Path
    mask: Path
    label: int


@dataclass(frozen=True)
class Dataset:
    classes: tuple[str, ...]
    lesions: tuple[Lesion, ...]


def open_dataset(images: Path, masks: Path, truth: Path) -> Dataset:
    """Read the table `truth` and check that every photograph and mask exists; reads no pixels."""
    try:
        with truth.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(
            truth, f"no readable CSV table ({error})", "Point to the ground truth's CSV."
        ) from error
    columns = list(rows[0]) if rows else []
    if len(columns) < 3 or columns[0] != "image" or not {*columns[1:]} <= {*CLASSES, UNKNOWN}:
        advice = f"ISIC's begins image,MEL,NV; known are {', '.join(CLASSES)}."
        raise DatasetError(truth, f"{len(rows)} rows with columns {columns}", advice)
    classes, lesions = tuple(column for column in columns[1:] if column != UNKNOWN), []
    for row in rows:
        image, mask = images / f"{row['image']}.jpg", masks / f"{row['image']}_segmentation.png"
        for file in (image, mask):
            if not file.is_file():
                raise DatasetError(
                    file, f"listed in {truth}, but missing", "Unpack the archive again, to its end."
                )
        marks = [row[name] in ("1", "1.0") for name in classes]
        if marks.count(True) != 1 or any(
            row[name] not in ("0", "0.0", "1", "1.0") for name in classes
        ):
            advice = "Each row has one 1.0 among zeros; leave others out."
            raise DatasetError(truth, f"{row['image']} has no known class: {row}", advice)
        lesions.append(Lesion(image, mask, marks.index(True)))
    return Dataset(classes, tuple(lesions))


def pixels(lesion: Lesion, side: int) -> np.ndarray:
    """The middle square of the photograph, uint8 [side, side, 3]; shrinking averages pixels."""
    return np.asarray(
        ImageOps.fit(_opened(lesion.image).convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    )


def mask_pixels(lesion: Lesion, side: int) -> np.ndarray:
    """The middle square of the mask, int32 [side, side], 1 on the lesion."""
    mask, photograph = _opened(lesion.mask), _opened(lesion.image)
    if mask.size != photograph.size:
        advice = "Check that the two belong together and neither was resized alone."
        raise DatasetError(
            lesion.mask, f"{mask.size} pixels, where {lesion.image} has {photograph.size}", advice
        )
    if mask.mode != "L" or not np.isin(np.asarray(mask), (0, 255)).all():
        advice = "Masks are PNG files, 255 on the lesion; smoothing or JPEG would add other values."
        raise DatasetError(lesion.mask, f"mode {mask.mode}, not grey with 0 and 255 alone", advice)
    return (np.asarray(ImageOps.fit(mask, (side, side), Image.Resampling.NEAREST)) > 0).astype(
        np.int32
    )


def _opened(path: Path) -> Image.Image:
    """The picture, decoded completely."""
    try:
        with Image.open(path) as picture:
            picture.load()
            return picture
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatasetError(
            path, f"no whole picture ({error})", "Fetch the file again; no pixel was used."
        ) from error
