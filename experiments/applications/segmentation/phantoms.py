"""Small synthetic brain scans in the format of Task01_BrainTumour, in place of real ones.

    python -m experiments.applications.segmentation.phantoms ROOT --cases 4 --size 64 --seed 0

A head is an ellipsoid with smooth texture on exact zeros, as after skull stripping. A tumour is
nested ellipsoids: edema around an enhancing rim around a non-enhancing core. The same arguments
give the same files, byte for byte.
"""

import argparse
import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from nibabel.nifti1 import Nifti1Image

from experiments.applications.segmentation.decathlon import Dataset, open_dataset

MODALITIES = ("FLAIR", "T1w", "T1gd", "T2w")
LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")
EDEMA, CORE, RIM = 1, 2, 3

INTENSITY = np.array([
    [300, 600, 350, 480],  # FLAIR: edema bright
    [500, 380, 260, 420],  # T1w: tumour dark
    [500, 380, 260, 850],  # T1gd: the rim takes up the contrast agent
    [350, 700, 800, 500],  # T2w: fluid bright
], np.float32)  # fmt: skip
"""Mean intensity per modality of healthy tissue, edema, core and rim, in arbitrary units."""

FIELD_OF_VIEW_MM = 240.0
SMALLEST = 16
"""Fewest voxels a side: below, the core and the rim of a tumour share a voxel."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a data set. A change to the drawing raises `version`."""

    cases: int
    size: int
    seed: int
    version: int = 1

    def __post_init__(self) -> None:
        if self.cases < 1 or self.size < SMALLEST or self.seed < 0:
            raise ValueError(
                f"Phantoms need cases >= 1, size >= {SMALLEST} voxels and seed >= 0; "
                f"got cases={self.cases}, size={self.size}, seed={self.seed}."
            )


def write_phantoms(root: str | Path, cases: int = 4, size: int = 64, seed: int = 0) -> Dataset:
    """Write `cases` phantoms of `size`^3 voxels in Decathlon layout to `root`, or reuse them.

    The folder is written under another name and renamed last, so an interrupted call leaves no
    `root`. FileExistsError: `root` exists and differs, even in a single byte.
    """
    root, recipe = Path(root).absolute(), Recipe(cases, size, seed)
    if os.path.lexists(root) and not (root.is_dir() and not any(root.iterdir())):
        _require(root, recipe)
        return open_dataset(root)
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as scratch:
        draft = Path(scratch) / root.name
        _write(draft, recipe)
        try:
            os.replace(draft, root)
        except OSError:  # another process was first
            _require(root, recipe)
    return open_dataset(root)


def draw(size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One phantom: image int16 [size, size, size, 4], 0 outside; label uint8 [size, size, size]."""
    centre = (size - 1) / 2 + size * generator.uniform(-0.02, 0.02, 3)
    axes = size * np.array([0.37, 0.42, 0.35]) * generator.uniform(0.95, 1.05, 3)
    head = ellipsoid(size, centre, axes)
    label = _tumours(size, centre, axes, generator) * head
    texture = smooth(size, generator)
    image = np.zeros((size, size, size, len(MODALITIES)), np.int16)
    for channel, means in enumerate(INTENSITY):
        shade = 1 + 0.12 * texture + 0.06 * smooth(size, generator)
        voxels = means[label] * shade + 10 * generator.standard_normal(label.shape, np.float32)
        image[..., channel] = np.where(head, np.clip(np.rint(voxels), 1, 4095), 0)
    return image, label


def _tumours(
    size: int, centre: np.ndarray, axes: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Labels uint8 of one to three tumours in the inner half of the head; inner tissue wins."""
    middles, radii = [], []
    for _ in range(generator.integers(1, 4)):
        direction = generator.standard_normal(3)
        reach = 0.5 * generator.random() ** (1 / 3) / np.linalg.norm(direction)
        middles.append(np.rint(centre + axes * reach * direction))
        radii.append(size * generator.uniform(0.10, 0.16, 3))
    label = np.zeros((size,) * 3, np.uint8)
    for tissue, share in ((EDEMA, 1.0), (RIM, 0.65), (CORE, 0.4)):
        for middle, radius in zip(middles, radii, strict=True):
            label[ellipsoid(size, middle, share * radius)] = tissue
    return label


def ellipsoid(size: int, centre: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Boolean [size, size, size]: voxels inside the ellipsoid with semi-axes `axes`, in voxels."""
    squares = [
        ((np.arange(size) - middle) / axis) ** 2 for middle, axis in zip(centre, axes, strict=True)
    ]
    return squares[0][:, None, None] + squares[1][:, None] + squares[2] <= 1


def smooth(size: int, generator: np.random.Generator, knots: int = 7) -> np.ndarray:
    """Float32 [size, size, size]: normal numbers on a grid of `knots`^3, linearly interpolated."""
    at = np.linspace(0, knots - 1, size)
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(knots))).astype(np.float32)
    field = generator.standard_normal((knots,) * 3, np.float32)
    for _ in range(3):  # each pass interpolates the first axis and moves it last
        field = np.tensordot(field, weights, axes=(0, 1))
    return field


def _write(root: Path, recipe: Recipe) -> None:
    """Write the data set, `dataset.json` last. Case i depends only on the seed and i."""
    spacing_mm = FIELD_OF_VIEW_MM / recipe.size
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    for index, entry in enumerate(_entries(recipe)):
        image, label = draw(recipe.size, np.random.default_rng([recipe.seed, index]))
        save(root / entry["image"], image, spacing_mm)
        save(root / entry["label"], label, spacing_mm)
    (root / "dataset.json").write_bytes(_description(recipe, _digests(root, recipe)))


def save(path: Path, voxels: np.ndarray, spacing_mm: float) -> None:
    """Write a gzipped NIfTI-1 file without a time stamp: equal voxels give equal bytes."""
    image = Nifti1Image(voxels, np.diag([spacing_mm, spacing_mm, spacing_mm, 1.0]))
    image.header.set_xyzt_units("mm")
    path.write_bytes(gzip.compress(image.to_bytes(), compresslevel=1, mtime=0))


def _entries(recipe: Recipe) -> list[dict[str, str]]:
    """The field "training" of dataset.json."""
    names = [f"PHANTOM_{number:03d}.nii.gz" for number in range(1, recipe.cases + 1)]
    return [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names]


def _digests(root: Path, recipe: Recipe) -> dict[str, str]:
    """SHA-256 of every file that the recipe lists."""
    listed = [path for entry in _entries(recipe) for path in entry.values()]
    return {path: hashlib.sha256((root / path).read_bytes()).hexdigest() for path in listed}


def _description(recipe: Recipe, digests: Mapping[str, str]) -> bytes:
    """dataset.json: the Decathlon's fields, and "phantom", which identifies the data set."""
    fields = {
        "name": "BrainTumourPhantoms",
        "description": "Ellipsoids in the layout of Task01_BrainTumour; "
        "no patient, no medical content",
        "tensorImageSize": "4D",
        "modality": {str(index): name for index, name in enumerate(MODALITIES)},
        "labels": {str(index): name for index, name in enumerate(LABELS)},
        "numTraining": recipe.cases, "numTest": 0, "training": _entries(recipe), "test": [],
        "phantom": {**asdict(recipe), "sha256": digests},
    }  # fmt: skip
    return (json.dumps(fields, indent=1) + "\n").encode()


def _require(root: Path, recipe: Recipe) -> None:
    """Raise FileExistsError unless `root` holds exactly the recipe's files, byte for byte."""
    wanted = {root / path for entry in _entries(recipe) for path in entry.values()} | {
        root / "dataset.json"
    }
    whole = {path for path in root.rglob("*") if not path.is_dir()} == wanted
    if not whole or (root / "dataset.json").read_bytes() != _description(
        recipe, _digests(root, recipe)
    ):
        raise FileExistsError(
            f"{root}: exists and is not the untouched phantom data set of {recipe}. Nothing was "
            "overwritten. "
            "Choose another folder, or remove this one first."
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write phantom brain scans in Medical Segmentation Decathlon layout."
    )
    parser.add_argument("root", type=Path, help="folder to create")
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="voxels a side")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        dataset = write_phantoms(options.root, options.cases, options.size, options.seed)
    except (FileExistsError, ValueError) as error:
        parser.error(str(error))
    print(
        f"{options.root}: {len(dataset.cases)} cases of {options.size}^3 voxels x "
        f"{', '.join(dataset.modalities)}"
    )


if __name__ == "__main__":
    main()
