"""Data sets in the layout of the Medical Segmentation Decathlon.

The layout (Antonelli et al., Nature Communications 2022) is a folder with `dataset.json`,
`imagesTr/` and `labelsTr/`. Images are NIfTI volumes (x, y, z, modality), or (x, y, z) for a single
modality; labels are integer volumes (x, y, z). Anything else raises `DatasetError`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from experiments.applications.segmentation.nifti import read_voxels
from experiments.datasets import DatasetError

__all__ = ["Case", "Dataset", "DatasetError", "Volume", "load_case", "open_dataset"]


@dataclass(frozen=True)
class Case:
    """One training pair, for example BRATS_001: the files of an image and its label."""

    name: str
    image: Path
    label: Path


@dataclass(frozen=True)
class Dataset:
    """The content of `dataset.json`.

    A position in `modalities` is a channel of the image, a position in `labels` a label's value.
    """

    name: str
    modalities: tuple[str, ...]
    labels: tuple[str, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True, eq=False)
class Volume:
    """A case: image float32 [X, Y, Z, M], z-scored per modality; label int32 [X, Y, Z]."""

    image: np.ndarray
    label: np.ndarray


def open_dataset(root: str | Path) -> Dataset:
    """Read `root/dataset.json` and check that every training file exists; reads no voxels."""
    root = Path(root)
    path = root / "dataset.json"
    fields = _read_description(path)
    name = _field(path, fields, "name", str)
    modalities = _names(path, fields, "modality")
    labels = _names(path, fields, "labels")
    pairs = _field(path, fields, "training", list)
    count = _field(path, fields, "numTraining", int)
    if not pairs or count != len(pairs):
        problem = f"numTraining is {count}, but {len(pairs)} training cases are listed"
        raise DatasetError(path, problem, "Restore the original file.")
    return Dataset(name, modalities, labels, tuple(_case(root, path, pair) for pair in pairs))


def load_case(dataset: Dataset, case: Case, size: int | None = None) -> Volume:
    """Read one case, check it against the data set's declarations and z-score the image.

    `size` is the side in voxels of the centred cube to crop or zero-pad to after the z-score; None
    keeps the volume. DatasetError: a file is damaged, or does not match the declarations or the
    other file.
    """
    if size is not None and size < 1:
        raise ValueError(
            f"size is the side of a cube in voxels and must be at least 1; got {size}."
        )
    image, label = _read_image(dataset, case.image), _read_label(dataset, case.label)
    if image.shape[:3] != label.shape:
        problem = (
            f"the label has {label.shape} voxels, its image {case.image} has {image.shape[:3]}"
        )
        advice = "Check that the two belong to the same case and neither was resampled alone."
        raise DatasetError(case.label, problem, advice)
    _standardize(image)
    return (
        Volume(image, label) if size is None else Volume(_centre(image, size), _centre(label, size))
    )


def _read_description(path: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        advice = "Point to the unpacked folder of one task, such as Task01_BrainTumour."
        raise DatasetError(path, f"cannot be read ({error.strerror})", advice) from error
    except ValueError as error:
        raise DatasetError(
            path, f"not valid JSON ({error})", "Restore the original file."
        ) from error
    if not isinstance(fields, dict):
        raise DatasetError(path, "holds no JSON object", "Restore the original file.")
    return fields


def _field[T](path: Path, fields: Mapping[str, Any], key: str, kind: type[T]) -> T:
    if key not in fields:
        raise DatasetError(
            path, f"lacks the field {key!r}", "A Decathlon dataset.json has it; restore the file."
        )
    if not isinstance(fields[key], kind):
        raise DatasetError(
            path, f"{key!r} is {fields[key]!r}, not a {kind.__name__}", "Restore the original file."
        )
    return fields[key]


def _names(path: Path, fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The values of a table {"0": name, "1": name, ...} in the order of its keys."""
    table = _field(path, fields, key, dict)
    ordered = [table.get(str(index)) for index in range(len(table))]
    names = tuple(name for name in ordered if isinstance(name, str))
    if not names or len(names) < len(table):
        problem = f'{key!r} is {table!r}, not {{"0": name, "1": name, ...}} without gaps'
        advice = "nnU-Net v2 writes its tables the other way round; use the Decathlon's own file."
        raise DatasetError(path, problem, advice)
    return names


def _case(root: Path, path: Path, pair: Any) -> Case:
    """The case of an entry {"image": "./imagesTr/NAME.nii.gz", "label": "./labelsTr/..."}."""
    match pair:
        case {"image": str(), "label": str()}:
            image, label = (_listed_file(root, path, pair[name]) for name in ("image", "label"))
        case _:
            raise DatasetError(
                path, f"training lists {pair!r}", 'Each entry is {"image": path, "label": path}.'
            )
    return Case(image.name.removesuffix(".gz").removesuffix(".nii"), image, label)


def _listed_file(root: Path, path: Path, listed: str) -> Path:
    relative = PurePosixPath(listed)
    if relative.is_absolute() or ".." in relative.parts:
        raise DatasetError(
            path, f"lists {listed!r}, outside the data set", "Paths are relative to dataset.json."
        )
    file = root / relative
    if not file.is_file():
        raise DatasetError(
            file, f"listed in {path}, but missing", "Unpack the archive again, to its end."
        )
    return file


def _read_image(dataset: Dataset, path: Path) -> np.ndarray:
    """The image as finite float32 [X, Y, Z, M], with M the number of modalities."""
    voxels = read_voxels(path)
    declared = len(dataset.modalities)
    if voxels.ndim == 3 and declared == 1:
        voxels = voxels[..., None]
    if voxels.ndim not in (3, 4):
        raise DatasetError(
            path,
            f"an image of shape {voxels.shape}",
            "Images are (x, y, z) or (x, y, z, modality).",
        )
    channels = voxels.shape[3] if voxels.ndim == 4 else 1
    if channels != declared:
        problem = (
            f"an image of shape {voxels.shape} has {channels} modalities "
            f"where {declared} are declared"
        )
        advice = "Stack the missing modalities in this order, or correct dataset.json."
        raise DatasetError(path, f"{problem} ({', '.join(dataset.modalities)})", advice)
    with np.errstate(over="ignore"):
        image = np.array(voxels, np.float32, order="C")
    _check_finite(path, image)
    return image


def _read_label(dataset: Dataset, path: Path) -> np.ndarray:
    """The label as int32 [X, Y, Z] of declared values."""
    voxels = read_voxels(path)
    if voxels.ndim != 3:
        raise DatasetError(
            path, f"a label of shape {voxels.shape}", "Labels are integer volumes (x, y, z)."
        )
    _check_finite(path, voxels)
    undeclared = np.unique(voxels[~np.isin(voxels, np.arange(len(dataset.labels)))])
    if undeclared.size:
        declared = f"0 to {len(dataset.labels) - 1}: {', '.join(dataset.labels)}"
        problem = f"label values {undeclared[:5].tolist()} are not declared ({declared})"
        raise DatasetError(
            path, problem, "Map them to declared values, or declare them in dataset.json."
        )
    return voxels.astype(np.int32, order="C")


def _check_finite(path: Path, voxels: np.ndarray) -> None:
    bad = int(np.count_nonzero(~np.isfinite(voxels)))
    if bad:
        problem = f"{bad} of {voxels.size} voxels are NaN or infinite in float32"
        raise DatasetError(path, problem, "Write it again from its source.")


def _standardize(image: np.ndarray) -> None:
    """Give the non-zero voxels of each modality mean 0 and standard deviation 1, in place.

    Zero is the background of a skull-stripped scan and stays zero. A modality of a single intensity
    becomes zero.
    """
    for channel in range(image.shape[3]):
        voxels = image[..., channel]
        inside = voxels != 0
        values = voxels[inside].astype(np.float64)
        if values.size:
            deviation = values.std() if values.min() < values.max() else 1.0
            voxels[inside] = (values - values.mean()) / deviation


def _centre(array: np.ndarray, size: int) -> np.ndarray:
    """Crop or zero-pad the three spatial axes to `size`; an odd voxel goes to the high end."""
    common = [min(extent, size) for extent in array.shape[:3]]
    source = tuple(
        slice((n - c) // 2, (n - c) // 2 + c) for n, c in zip(array.shape[:3], common, strict=True)
    )
    target = tuple(slice((size - c) // 2, (size - c) // 2 + c) for c in common)
    cube = np.zeros((size,) * 3 + array.shape[3:], array.dtype)
    cube[target] = array[source]
    return cube
