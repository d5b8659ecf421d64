"""A small data set of phantoms, written once and copied for each test that changes it."""

import shutil
from pathlib import Path

import pytest

from experiments.applications.skin_lesions.isic import Dataset, open_dataset
from experiments.applications.skin_lesions.phantoms import IMAGES, MASKS, TRUTH, write_phantoms


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 lesions, seed 0; read-only."""
    root = tmp_path_factory.mktemp("skin") / "isic"
    write_phantoms(root, 24, seed=0)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy of `pristine` to change."""
    return Path(shutil.copytree(pristine, tmp_path / "isic"))


def opened_at(root: Path) -> Dataset:
    return open_dataset(root / IMAGES, root / MASKS, root / TRUTH)


@pytest.fixture(scope="session")
def dataset(pristine: Path) -> Dataset:
    return opened_at(pristine)
