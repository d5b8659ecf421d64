"""The reader and the writer on valid files, and every error with a damaged file."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.applications.skin_lesions.isic import (
    Dataset,
    Lesion,
    _opened,
    mask_pixels,
    open_dataset,
    pixels,
)
from experiments.applications.skin_lesions.phantoms import (
    IMAGES,
    LOOKS,
    MASKS,
    TRUTH,
    draw,
    write_phantoms,
)
from experiments.datasets import DatasetError

FIRST = "ISIC_0024306"
PHOTOGRAPH, MASK = f"{IMAGES}/{FIRST}.jpg", f"{MASKS}/{FIRST}_segmentation.png"


def opened_at(root: Path) -> Dataset:
    return open_dataset(root / IMAGES, root / MASKS, root / TRUTH)


def use_first(root: Path) -> None:
    """Read the first lesion's files as training does."""
    lesion = opened_at(root).lesions[0]
    pixels(lesion, 8)
    mask_pixels(lesion, 8)


def refused(root: Path, file: str, *words: str, use: Callable[[Path], object] = use_first) -> None:
    """An error that names `file`, says `words` and ends with advice."""
    with pytest.raises(DatasetError) as caught:
        use(root)
    message = str(caught.value)
    assert caught.value.path == root / file
    assert message.startswith(str(root / file)) and message.endswith(".")
    assert all(word in message for word in words), message


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def edit(root: Path, change: Callable[[list[list[str]]], object]) -> None:
    """Change the table's rows, the heading first."""
    rows = list(csv.reader((root / TRUTH).read_text().splitlines()))
    change(rows)
    (root / TRUTH).write_text("".join(",".join(row) + "\n" for row in rows))


def put(row: int, column: int, cell: str) -> Callable[[list[list[str]]], object]:
    return lambda rows: rows[row].__setitem__(column, cell)


def test_declarations(pristine: Path, dataset: Dataset) -> None:
    assert dataset.classes == ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
    assert len(dataset.lesions) == 24
    assert (dataset.lesions[0].image, dataset.lesions[0].mask) == (
        pristine / PHOTOGRAPH,
        pristine / MASK,
    )
    for number, lesion in enumerate(dataset.lesions):
        kind, image, mask = draw(np.random.default_rng([0, number]))
        assert dataset.classes[lesion.label] == kind
        assert _opened(lesion.image).size == (image.shape[1], image.shape[0])
        np.testing.assert_array_equal(_opened(lesion.mask), mask)


def test_the_same_arguments_write_the_same_bytes(pristine: Path, tmp_path: Path) -> None:
    """A lesion does not depend on the number of lesions."""
    write_phantoms(tmp_path / "again", 24, seed=0)
    write_phantoms(tmp_path / "few", 3, seed=0)
    write_phantoms(tmp_path / "other", 3, seed=1)
    assert contents(tmp_path / "again") == contents(pristine)
    assert contents(tmp_path / "few")[PHOTOGRAPH] == contents(pristine)[PHOTOGRAPH]
    assert contents(tmp_path / "other")[PHOTOGRAPH] != contents(pristine)[PHOTOGRAPH]


def test_photographs_are_of_many_sizes_and_classes(dataset: Dataset) -> None:
    assert len({_opened(lesion.image).size for lesion in dataset.lesions}) > 5
    assert len({lesion.label for lesion in dataset.lesions}) > 3
    assert sum(look.share for look in LOOKS.values()) == pytest.approx(1)


def test_the_lesion_is_darker_or_redder_than_the_skin() -> None:
    """The mask covers the pixels that differ from the photograph's corners."""
    for number in range(30):
        _, image, mask = draw(np.random.default_rng([7, number]))
        inside, outside = image[mask > 0].mean(0), image[mask == 0].mean(0)
        assert 0.02 < (mask > 0).mean() < 0.5
        assert np.abs(inside - outside).max() > 5


def test_nothing_is_overwritten(root: Path) -> None:
    before = contents(root)
    with pytest.raises(FileExistsError):
        write_phantoms(root, 2)
    assert contents(root) == before


@pytest.mark.parametrize("size", [(90, 60), (60, 90), (61, 61), (20, 33)])
def test_prepared_is_the_middle_square(tmp_path: Path, size: tuple[int, int]) -> None:
    """With green in the middle square and red outside, no red remains; masks are cropped alike."""
    lesion = Lesion(tmp_path / "a.png", tmp_path / "b.png", 0)
    picture, side = Image.new("RGB", size, (255, 0, 0)), min(size)
    picture.paste(
        (0, 255, 0),
        ((size[0] - side) // 2, (size[1] - side) // 2, *((s + side) // 2 for s in size)),
    )
    picture.save(lesion.image)
    picture.getchannel("G").save(lesion.mask)
    square = pixels(lesion, 16)
    assert square.shape == (16, 16, 3) and square.dtype == np.uint8
    assert (square[1:-1, 1:-1] == (0, 255, 0)).all()
    mask = mask_pixels(lesion, 16)
    assert mask.shape == (16, 16) and mask.dtype == np.int32 and (mask[1:-1, 1:-1] == 1).all()


def test_shrinking_averages(tmp_path: Path) -> None:
    """A fine checkerboard becomes grey, not a coarse checkerboard."""
    board = np.indices((64, 64)).sum(0) % 2 * np.uint8(255)
    Image.fromarray(board.astype(np.uint8)).save(tmp_path / "a.png")
    assert np.abs(pixels(Lesion(tmp_path / "a.png", tmp_path, 0), 8).astype(int) - 128).max() < 20


@pytest.mark.parametrize("file", [PHOTOGRAPH, MASK])
def test_missing_file(root: Path, file: str) -> None:
    (root / file).unlink()
    refused(root, file, "listed in", "missing")


@pytest.mark.parametrize("file", [PHOTOGRAPH, MASK])
def test_file_that_vanishes_after_opening(root: Path, file: str) -> None:
    lesion = opened_at(root).lesions[0]
    (root / file).unlink()
    refused(root, file, "No such file", use=lambda _: (pixels(lesion, 8), mask_pixels(lesion, 8)))


@pytest.mark.parametrize("file", [PHOTOGRAPH, MASK])
@pytest.mark.parametrize("keep", [0, 10, 0.3, 0.9, -30])
def test_truncated_picture(root: Path, file: str, keep: float) -> None:
    content = (root / file).read_bytes()
    (root / file).write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    refused(root, file)


def test_not_a_picture(root: Path) -> None:
    (root / PHOTOGRAPH).write_bytes(b"<html>404 Not Found</html>" * 100)
    refused(root, PHOTOGRAPH, "no whole picture")


def test_mask_of_another_size(root: Path) -> None:
    mask = Image.open(root / MASK)
    width, height = mask.size
    mask.resize((width - 1, height)).save(root / MASK)
    refused(root, MASK, f"({width - 1}, {height})", f"({width}, {height})", PHOTOGRAPH)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_mask_with_other_values(root: Path, mode: str) -> None:
    mask = Image.open(root / MASK)
    mask.point(lambda value: value // 2).convert(mode).save(root / MASK)
    refused(root, MASK, "mode " + mode, "0 and 255 alone")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(1, 4, "0.0"), (FIRST, "no known class")),
        (put(1, 1, "1.0"), (FIRST, "no known class")),
        (put(1, 1, "0.5"), (FIRST, "no known class")),
        (put(1, 1, ""), (FIRST, "no known class")),
        (put(1, 1, "nan"), (FIRST, "no known class")),
        (lambda rows: rows[1].pop(), (FIRST, "no known class")),
        (put(0, 1, "MELANOMA"), ("columns ['image', 'MELANOMA'", "known are MEL, NV")),
        (put(0, 0, "name"), ("columns ['name'",)),
        (lambda rows: rows.__delitem__(slice(1, None)), ("0 rows",)),
    ],
)
def test_table_with_an_unknown_class(
    root: Path, change: Callable[[list[list[str]]], object], words: tuple[str]
) -> None:
    edit(root, change)
    refused(root, TRUTH, *words)


def test_a_lesion_of_unknown_class_as_in_2019(root: Path) -> None:
    """The column UNK is allowed, a lesion in it is not."""
    edit(
        root,
        lambda rows: [
            row.append(cell) for row, cell in zip(rows, ["UNK"] + ["0.0"] * 24, strict=True)
        ],
    )
    assert "UNK" not in opened_at(root).classes
    edit(root, lambda rows: rows.__setitem__(1, [FIRST, *["0.0"] * 7, "1.0"]))
    refused(root, TRUTH, FIRST, "no known class")


def test_missing_or_binary_table(root: Path) -> None:
    (root / TRUTH).write_bytes(b"\xff\xfe\x00\x81")
    refused(root, TRUTH, "no readable CSV table")
    (root / TRUTH).unlink()
    refused(root, TRUTH, "No such file")
