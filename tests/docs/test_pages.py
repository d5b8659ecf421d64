"""The reference names all that is public, and the pages for contributors name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memplan
from memplan import api, equinox, errors, keras, nnx, parallel, stages

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "api.md").read_text()
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md", "docs/guides/does_not_fit.md"]
FILE = re.compile(r"`((?:memplan|tests|experiments|docs|models)/[\w./]*)`")


def documented(name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}(\(\))?$", REFERENCE, re.MULTILINE) is not None


@pytest.mark.parametrize("name", [f"memplan.{name}" for name in memplan.__all__ if name not in ("devices", "parallel")])
def test_all_of_memplan_is_in_the_reference(name: str) -> None:
    assert documented(name) or (hasattr(errors, name.rpartition(".")[2]) and "automodule:: memplan.errors" in REFERENCE)


@pytest.mark.parametrize("name", [f"memplan.api.{name}" for name in api.__all__ if not hasattr(memplan, name)])
def test_all_of_api_is_in_the_reference(name: str) -> None:
    assert documented(name)


@pytest.mark.parametrize(
    "name", [f"{room.__name__}.{name}" for room in (equinox, keras, nnx, parallel, stages) for name in room.__all__]
)
def test_all_of_a_module_is_in_the_reference(name: str) -> None:
    assert documented(name)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    named = FILE.findall((ROOT / page).read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_version_is_that_of_the_newest_release() -> None:
    newest = re.search(r"^## (\S+) - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and memplan.__version__ in (newest[1], "0+source")
