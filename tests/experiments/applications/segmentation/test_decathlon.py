"""The reader on valid files, and every error with a file that is really damaged."""

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nibabel.loadsave import load
from nibabel.nifti1 import Nifti1Image

from experiments.applications.segmentation.decathlon import (
    DatasetError,
    Volume,
    _centre,
    load_case,
    open_dataset,
)
from experiments.applications.segmentation.phantoms import LABELS, MODALITIES, save

IMAGE, LABEL = "imagesTr/PHANTOM_001.nii.gz", "labelsTr/PHANTOM_001.nii.gz"


def stored(path: Path) -> np.ndarray:
    """The voxels as nibabel reads them."""
    image = load(path)
    assert isinstance(image, Nifti1Image)
    return np.asarray(image.dataobj)


def first(root: Path, size: int | None = None) -> Volume:
    dataset = open_dataset(root)
    return load_case(dataset, dataset.cases[0], size)


def rewrite(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    save(path, change(stored(path)), 15.0)


def describe(root: Path, **changes: Any) -> None:
    """Change fields of dataset.json; None removes one."""
    path = root / "dataset.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Put `value` into one voxel, as float64."""

    def change(voxels: np.ndarray) -> np.ndarray:
        voxels = voxels.astype(np.float64)
        voxels.flat[voxels.size // 2] = value
        return voxels

    return change


def refused(root: Path, file: str, *words: str) -> None:
    """Loading the first case raises an error with `file`, `words` and advice."""
    with pytest.raises(DatasetError) as caught:
        first(root)
    message = str(caught.value)
    assert caught.value.path == root / file
    assert message.startswith(str(root / file))
    assert all(word in message for word in words), message
    assert message.endswith(".")


def test_declarations(pristine: Path) -> None:
    dataset = open_dataset(pristine)
    assert dataset.name == "BrainTumourPhantoms"
    assert dataset.modalities == MODALITIES == ("FLAIR", "T1w", "T1gd", "T2w")
    assert dataset.labels == LABELS
    assert [case.name for case in dataset.cases] == ["PHANTOM_001", "PHANTOM_002"]
    assert dataset.cases[0].image == pristine / IMAGE
    assert dataset.cases[0].label == pristine / LABEL


def test_voxels_are_z_scored_per_modality_over_the_head(pristine: Path) -> None:
    volume, raw = first(pristine), stored(pristine / IMAGE).astype(np.float64)
    assert volume.image.shape == (16, 16, 16, 4)
    assert volume.image.dtype == np.float32
    assert volume.image.flags.c_contiguous
    for channel in range(4):
        head = raw[..., channel] != 0
        expected = (raw[head, channel] - raw[head, channel].mean()) / raw[head, channel].std()
        np.testing.assert_allclose(volume.image[head, channel], expected, rtol=1e-5, atol=1e-6)
        assert not volume.image[~head, channel].any()


def test_labels_are_as_stored(pristine: Path) -> None:
    volume = first(pristine)
    assert volume.label.dtype == np.int32
    np.testing.assert_array_equal(volume.label, stored(pristine / LABEL))
    assert np.unique(volume.label).tolist() == [0, 1, 2, 3]


def test_empty_and_constant_modalities_become_zero(root: Path) -> None:
    def flatten(voxels: np.ndarray) -> np.ndarray:
        voxels = voxels.astype(np.float32)
        voxels[..., 0] = 0
        voxels[..., 1] = np.where(voxels[..., 1] > 0, 0.1, 0)
        return voxels

    rewrite(root / IMAGE, flatten)
    image = first(root).image
    assert np.abs(image[..., :2]).max() < 1e-6
    assert image[..., 2].std() > 0


def test_single_modality_may_be_three_dimensional(root: Path) -> None:
    describe(root, modality={"0": "CT"})
    rewrite(root / IMAGE, lambda voxels: voxels[..., 0])
    assert first(root).image.shape == (16, 16, 16, 1)


def test_header_scaling_and_uncompressed_files(root: Path) -> None:
    """A float label and a scaled image, both uncompressed, read like their gzipped originals."""
    pair = {"image": "./imagesTr/PHANTOM_001.nii", "label": "./labelsTr/PHANTOM_001.nii"}
    before = first(root)
    Nifti1Image(stored(root / LABEL).astype(np.float32), np.eye(4)).to_filename(
        root / pair["label"]
    )
    scaled = Nifti1Image(stored(root / IMAGE) * 0.5, np.eye(4))
    scaled.set_data_dtype(np.int16)
    scaled.to_filename(root / pair["image"])
    describe(root, training=[pair], numTraining=1)
    after = first(root)
    assert open_dataset(root).cases[0].name == "PHANTOM_001"
    np.testing.assert_array_equal(after.label, before.label)
    np.testing.assert_allclose(after.image, before.image, atol=1e-3)


def test_crop_is_the_centre(pristine: Path) -> None:
    whole, cut = first(pristine), first(pristine, 9)
    np.testing.assert_array_equal(cut.image, whole.image[3:12, 3:12, 3:12])
    np.testing.assert_array_equal(cut.label, whole.label[3:12, 3:12, 3:12])


def test_padding_is_background(pristine: Path) -> None:
    whole, padded = first(pristine), first(pristine, 19)
    inner = (slice(1, 17),) * 3
    np.testing.assert_array_equal(padded.image[inner], whole.image)
    np.testing.assert_array_equal(padded.label[inner], whole.label)
    assert np.count_nonzero(padded.image) == np.count_nonzero(whole.image)
    assert np.count_nonzero(padded.label) == np.count_nonzero(whole.label)


@given(st.integers(1, 40), st.tuples(*[st.integers(1, 24)] * 3))
def test_crop_and_pad_keep_the_middle(size: int, shape: tuple[int, int, int]) -> None:
    """Along each axis, the kept voxels are consecutive and centred to within half a voxel."""
    numbered = np.arange(1, np.prod(shape) + 1).reshape(shape)
    cube = _centre(numbered, size)
    assert cube.shape == (size,) * 3
    for axis, extent in enumerate(shape):
        ruler = np.arange(1, extent + 1).reshape([-1 if a == axis else 1 for a in range(3)])
        line = _centre(np.broadcast_to(ruler, shape), size).max(axis=tuple({0, 1, 2} - {axis}))
        at = np.flatnonzero(line)
        assert at.size == min(extent, size)
        offset = line[at] - 1 - at  # where a voxel came from minus where it went
        assert (offset == offset[0]).all()
        assert (
            offset[0] == (extent - size) // 2
            if extent >= size
            else -offset[0] == (size - extent) // 2
        )


@pytest.mark.parametrize("size", [0, -4])
def test_size_must_be_positive(pristine: Path, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        first(pristine, size)


def test_missing_description(tmp_path: Path) -> None:
    refused(tmp_path, "dataset.json", "No such file", "Task01_BrainTumour")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"name": "BRA', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[]", "no JSON object"),
    ],
)
def test_malformed_description(root: Path, content: bytes, words: str) -> None:
    (root / "dataset.json").write_bytes(content)
    refused(root, "dataset.json", words)


@pytest.mark.parametrize("field", ["name", "modality", "labels", "numTraining", "training"])
def test_lacking_field(root: Path, field: str) -> None:
    describe(root, **{field: None})
    refused(root, "dataset.json", "lacks the field", repr(field))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": 7}, "not a str"),
        ({"modality": ["FLAIR"]}, "not a dict"),
        ({"modality": {}}, "without gaps"),
        ({"modality": {"0": "FLAIR", "2": "T1w"}}, "without gaps"),
        ({"labels": {"background": 0, "edema": 1}}, "nnU-Net v2"),
        ({"numTraining": 3}, "numTraining is 3, but 2"),
        ({"numTraining": 0, "training": []}, "0 training cases"),
        ({"training": ["./imagesTr/A.nii.gz", "./imagesTr/B.nii.gz"]}, "Each entry"),
        ({"training": [{"image": f"./{IMAGE}"}], "numTraining": 1}, "Each entry"),
        (
            {"training": [{"image": "../a.nii", "label": "b.nii"}], "numTraining": 1},
            "outside the data set",
        ),
        (
            {"training": [{"image": "/a.nii", "label": "b.nii"}], "numTraining": 1},
            "outside the data set",
        ),
    ],
)
def test_wrong_field(root: Path, changes: dict[str, Any], words: str) -> None:
    describe(root, **changes)
    refused(root, "dataset.json", words)


@pytest.mark.parametrize("file", [IMAGE, LABEL])
def test_listed_file_missing(root: Path, file: str) -> None:
    (root / file).unlink()
    refused(root, file, "listed in", "missing")


def test_file_that_vanishes_after_opening(root: Path) -> None:
    dataset = open_dataset(root)
    (root / LABEL).unlink()
    with pytest.raises(DatasetError, match="the file is missing"):
        load_case(dataset, dataset.cases[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda voxels: voxels[..., :3],
            "has 3 modalities where 4 are declared (FLAIR, T1w, T1gd, T2w)",
        ),
        (lambda voxels: voxels[..., 0], "has 1 modalities where 4 are declared"),
        (lambda voxels: np.concatenate([voxels, voxels[..., :1]], -1), "has 5 modalities where 4"),
        (lambda voxels: voxels[:, :, 0, 0], "an image of shape (16, 16)"),
        (lambda voxels: voxels[:, :, :, None], "an image of shape (16, 16, 16, 1, 4)"),
        (lambda voxels: voxels.astype(np.complex64), "type complex64"),
    ],
)
def test_image_of_wrong_shape(
    root: Path, change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    rewrite(root / IMAGE, change)
    refused(root, IMAGE, words)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_image_not_finite(root: Path, value: float) -> None:
    rewrite(root / IMAGE, with_value(value))
    refused(root, IMAGE, "1 of 16384 voxels are NaN or infinite")


@pytest.mark.parametrize("value", [4, -1, 1.5, 255])
def test_label_not_declared(root: Path, value: float) -> None:
    rewrite(root / LABEL, with_value(value))
    refused(root, LABEL, f"[{float(value)}]", "0 to 3: background, edema")


def test_label_not_finite(root: Path) -> None:
    rewrite(root / LABEL, with_value(np.nan))
    refused(root, LABEL, "1 of 4096 voxels are NaN")


def test_label_with_channels(root: Path) -> None:
    rewrite(root / LABEL, lambda voxels: voxels[..., None, None].repeat(2, -1))
    refused(root, LABEL, "a label of shape (16, 16, 16, 1, 2)")


def test_image_and_label_of_different_size(root: Path) -> None:
    rewrite(root / LABEL, lambda voxels: voxels[:, :, :-1])
    refused(root, LABEL, "(16, 16, 15)", "(16, 16, 16)", IMAGE)


@pytest.mark.parametrize("file", [IMAGE, LABEL])
@pytest.mark.parametrize("keep", [0, 5, 40, 0.5, -8, -1])
def test_truncated_gzip(root: Path, file: str, keep: float) -> None:
    """Also if only the checksum is missing, when all voxels could still be read."""
    content = (root / file).read_bytes()
    (root / file).write_bytes(content[: int(keep * len(content)) if keep == 0.5 else int(keep)])
    refused(root, file)


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_corrupt_gzip(root: Path, at: float) -> None:
    content = bytearray((root / IMAGE).read_bytes())
    content[int(at * len(content))] ^= 0x55
    (root / IMAGE).write_bytes(content)
    refused(root, IMAGE, "truncated or corrupt")


def test_sound_gzip_of_a_truncated_volume(root: Path) -> None:
    content = gzip.decompress((root / IMAGE).read_bytes())
    (root / IMAGE).write_bytes(gzip.compress(content[:-1]))
    refused(root, IMAGE, f"promises {len(content)} bytes", f"holds {len(content) - 1}")


def test_not_nifti(root: Path) -> None:
    (root / IMAGE).write_bytes(gzip.compress(b"<html>404 Not Found</html>" * 100))
    refused(root, IMAGE, "not a readable NIfTI-1 file")


def test_header_without_extent(root: Path) -> None:
    content = bytearray(gzip.decompress((root / IMAGE).read_bytes()))
    content[42:44] = (-3).to_bytes(2, "little", signed=True)  # dim[1]
    (root / IMAGE).write_bytes(gzip.compress(content))
    refused(root, IMAGE, "(-3, 16, 16, 4)")


def test_error_survives_a_worker_process(tmp_path: Path) -> None:
    error = DatasetError(tmp_path / "a.nii.gz", "is broken", "Mend it.")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == f"{tmp_path / 'a.nii.gz'}: is broken. Mend it."
    assert again.path == error.path
    assert isinstance(error, ValueError)
