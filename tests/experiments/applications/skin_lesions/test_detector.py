"""What was exported against what exported it, in this process and in one that knows nothing of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.applications.skin_lesions import detector, run
from experiments.applications.skin_lesions.detector import examine, found_in, load
from experiments.applications.skin_lesions.isic import Dataset
from experiments.applications.skin_lesions.photographs import pixels
from experiments.applications.skin_lesions.preparing import standardized_pixels
from experiments.applications.skin_lesions.training import exported, predicted
from experiments.datasets import DatasetError

SIDE = 12


def colours(images: Any) -> dict[str, Any]:
    """Shares by the mean colour: a network without layers."""
    shares = jax.nn.softmax(3 * jnp.sin(standardized_pixels(images).mean((1, 2))))
    return dict(zip(("RED", "GREEN", "BLUE"), shares.T, strict=True))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("detector") / "detector.bin"
    path.write_bytes(exported(colours, SIDE))
    return path


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_any_batch(file: Path, batch: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (batch, SIDE, SIDE, 3), np.uint8)
    found, expected = load(file)(images), predicted(colours, images, batch)
    assert list(found) == sorted(expected) and load(file).side == SIDE
    for name, shares in expected.items():
        np.testing.assert_array_equal(found[name], shares)


def test_photographs_few_at_a_time(file: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is a smaller one; names keep to their shares."""
    monkeypatch.setattr(detector, "EXAMINED_AT_ONCE", 5)
    photographs = [lesion.image for lesion in dataset.lesions[:12]]
    found = dict(examine(load(file), photographs))
    assert list(found) == photographs
    for path, shares in found.items():
        alone = predicted(colours, pixels(path, SIDE)[None], 1)
        assert shares == {name: pytest.approx(float(share[0]), rel=1e-6) for name, share in alone.items()}
        assert sum(shares.values()) == pytest.approx(1)


def test_in_a_process_without_the_code_that_trained_it(file: Path, dataset: Dataset) -> None:
    """Bit for bit, by its own command; and the hiding does hide."""
    lesions = dataset.lesions[:7]
    images = np.stack([pixels(lesion.image, SIDE) for lesion in lesions])
    expected = predicted(colours, images, len(lesions))
    there = run.deployed(file, lesions)
    for number, told in enumerate(there):
        assert told == {name: float(shares[number]) for name, shares in expected.items()}
        assert list(told.values()) == sorted(told.values(), reverse=True)


def test_hidden_modules_cannot_be_imported(
    file: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detector that needed one of them would not run: here it needs jax, and that is hidden too."""
    monkeypatch.setattr(run, "HIDDEN", (*run.HIDDEN, "jax"))
    with pytest.raises(RuntimeError, match="import of jax halted"):
        run.deployed(file, dataset.lesions[:1])


def test_folders_and_files(dataset: Dataset, tmp_path: Path) -> None:
    folder = dataset.lesions[0].image.parent
    assert found_in([folder]) == [lesion.image for lesion in dataset.lesions]
    assert found_in([tmp_path / "a.png", tmp_path]) == [tmp_path / "a.png"]


@pytest.mark.parametrize("content", [None, b"", b"no program" * 100])
def test_no_detector(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "detector.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


def test_a_truncated_photograph_ends_the_command(
    file: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, cut = dataset.lesions[0].image, tmp_path / "cut.jpg"
    cut.write_bytes(sound.read_bytes()[:-500])
    monkeypatch.setattr("sys.argv", ["detector", str(file), str(sound)])
    detector.main()
    assert json.loads(capsys.readouterr().out)["photograph"] == str(sound)
    monkeypatch.setattr("sys.argv", ["detector", str(file), str(sound), str(cut)])
    with pytest.raises(SystemExit, match=r"cut\.jpg: truncated"):
        detector.main()
