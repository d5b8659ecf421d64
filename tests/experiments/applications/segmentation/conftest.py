"""A tiny phantom data set, written once and copied for each test that changes it."""

import shutil
from pathlib import Path

import pytest

from experiments.applications.segmentation.phantoms import write_phantoms


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases of 16^3 voxels, seed 0; read-only."""
    root = tmp_path_factory.mktemp("segmentation") / "phantoms"
    write_phantoms(root, cases=2, size=16, seed=0)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy of `pristine` to change."""
    return Path(shutil.copytree(pristine, tmp_path / "phantoms"))
