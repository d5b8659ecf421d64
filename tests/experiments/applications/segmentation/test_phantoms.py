"""The phantom writer: anatomy, determinism, and nothing half-written."""

import os
from pathlib import Path

import numpy as np
import pytest

from experiments.applications.segmentation import phantoms
from experiments.applications.segmentation.decathlon import open_dataset
from experiments.applications.segmentation.phantoms import CORE, EDEMA, RIM, draw, write_phantoms


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("size", [16, 17, 32])
def test_anatomy(size: int) -> None:
    """All modalities share one head, away from the border, with every tissue inside."""
    for seed in range(20):
        image, label = draw(size, np.random.default_rng(seed))
        head = image[..., 0] > 0
        assert image.shape == (size, size, size, 4)
        assert label.shape == (size, size, size)
        assert ((image > 0) == head[..., None]).all()
        assert not label[~head].any()
        assert head[1:-1, 1:-1, 1:-1].sum() == head.sum()
        assert np.unique(label).tolist() == [0, 1, 2, 3]


def test_contrast_tells_the_tissues_apart() -> None:
    image, label = draw(48, np.random.default_rng(0))
    head = image[..., 0] > 0
    flair, t1w, t1gd, t2w = (
        {tissue: image[head & (label == tissue), channel].mean() for tissue in range(4)}
        for channel in range(4)
    )
    assert max(flair, key=lambda tissue: flair[tissue]) == EDEMA
    assert min(t1w, key=lambda tissue: t1w[tissue]) == CORE
    assert max(t1gd, key=lambda tissue: t1gd[tissue]) == RIM
    assert min(t2w, key=lambda tissue: t2w[tissue]) == 0


def test_tumours_are_nested() -> None:
    """No face of a core voxel touches healthy tissue."""
    _, label = draw(64, np.random.default_rng(3))
    sound = label == 0
    for axis in range(3):
        for shift in (-1, 1):
            assert not (np.roll(label == CORE, shift, axis) & sound).any()


def test_same_seed_same_bytes(pristine: Path, tmp_path: Path) -> None:
    write_phantoms(tmp_path / "again", cases=2, size=16, seed=0)
    again = contents(tmp_path / "again")
    assert again == contents(pristine)
    # RFC 1952: MTIME
    stamps = {content[4:8] for name, content in again.items() if name.endswith(".gz")}
    assert stamps == {bytes(4)}


def test_other_seed_other_voxels(pristine: Path, tmp_path: Path) -> None:
    write_phantoms(tmp_path / "other", cases=2, size=16, seed=1)
    for name, content in contents(tmp_path / "other").items():
        assert content != (pristine / name).read_bytes()


def test_a_case_does_not_depend_on_how_many_there_are(pristine: Path, tmp_path: Path) -> None:
    write_phantoms(tmp_path / "more", cases=3, size=16, seed=0)
    assert contents(pristine).items() - contents(tmp_path / "more").items() == {
        ("dataset.json", (pristine / "dataset.json").read_bytes())
    }


def test_untouched_data_set_is_reused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phantoms, "draw", None)
    assert write_phantoms(root, cases=2, size=16, seed=0) == open_dataset(root)


def test_empty_folder_is_filled(pristine: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_phantoms(str(tmp_path / "empty"), cases=2, size=16)
    assert contents(tmp_path / "empty") == contents(pristine)


@pytest.mark.parametrize("recipe", [(3, 16, 0), (1, 16, 0), (2, 17, 0), (2, 16, 1)])
def test_another_recipe_is_refused(root: Path, recipe: tuple[int, int, int]) -> None:
    before = contents(root)
    with pytest.raises(FileExistsError, match="Nothing was overwritten"):
        write_phantoms(root, *recipe)
    assert contents(root) == before


def test_touched_data_set_is_refused(root: Path) -> None:
    label = root / "labelsTr/PHANTOM_002.nii.gz"
    content = label.read_bytes()
    label.write_bytes(content[:-1])
    with pytest.raises(FileExistsError):
        write_phantoms(root, cases=2, size=16)
    label.write_bytes(content)
    (root / "notes.txt").touch()
    with pytest.raises(FileExistsError):
        write_phantoms(root, cases=2, size=16)
    (root / "notes.txt").unlink()
    write_phantoms(root, cases=2, size=16)


def test_foreign_folder_or_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for target in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(FileExistsError, match=str(target)):
            write_phantoms(target, cases=1, size=16)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_interrupted_writer_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    calls, genuine = [], phantoms.save

    def save(path: Path, voxels: np.ndarray, spacing_mm: float) -> None:
        calls.append(path)
        if len(calls) == failing:
            path.write_bytes(b"half a fi")
            raise error
        genuine(path, voxels, spacing_mm)

    monkeypatch.setattr(phantoms, "save", save)
    with pytest.raises(type(error)):
        write_phantoms(tmp_path / "phantoms", cases=2, size=16)
    assert list(tmp_path.iterdir()) == []


def test_failed_rename_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: Path, target: Path) -> None:
        raise PermissionError(f"{source} to {target}")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="phantoms"):
        write_phantoms(tmp_path / "phantoms", cases=1, size=16)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower of two writers finds the target filled when it renames, and uses it."""
    target, genuine = tmp_path / "phantoms", os.replace

    def replace(source: Path, destination: Path) -> None:
        monkeypatch.setattr(os, "replace", genuine)
        write_phantoms(target, cases=1, size=16)
        genuine(source, destination)

    monkeypatch.setattr(os, "replace", replace)
    assert write_phantoms(target, cases=1, size=16) == open_dataset(target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("recipe", [(0, 16, 0), (1, 15, 0), (1, 16, -1)])
def test_arguments_out_of_range(tmp_path: Path, recipe: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cases >= 1, size >= 16"):
        write_phantoms(tmp_path / "phantoms", *recipe)
    assert list(tmp_path.iterdir()) == []


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["phantoms", str(tmp_path / "a"), "--cases", "1", "--size", "16"]
    )
    phantoms.main()
    assert "1 cases of 16^3 voxels x FLAIR, T1w, T1gd, T2w" in capsys.readouterr().out
    monkeypatch.setattr(
        "sys.argv", ["phantoms", str(tmp_path / "a"), "--cases", "2", "--size", "16"]
    )
    with pytest.raises(SystemExit) as caught:
        phantoms.main()
    assert caught.value.code == 2
