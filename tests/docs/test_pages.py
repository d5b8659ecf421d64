"""The reference names all that is public, and the pages for contributors name files that are there."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
from pathlib import Path

import pytest

import memplan
from memplan import api, equinox, errors, keras, nnx, parallel, stages

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "api.md").read_text()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/architecture.md",
    "docs/guides/does_not_fit.md",
    "docs/guides/trust.md",
]
FILE = re.compile(r"`((?:memplan|tests|experiments|docs|models)/[\w./]*)`")


def documented(name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}(\(\))?$", REFERENCE, re.MULTILINE) is not None


@pytest.mark.parametrize(
    "name", [f"memplan.{name}" for name in memplan.__all__ if name not in ("devices", "parallel")]
)
def test_all_of_memplan_is_in_the_reference(name: str) -> None:
    assert documented(name) or (
        hasattr(errors, name.rpartition(".")[2]) and "automodule:: memplan.errors" in REFERENCE
    )


@pytest.mark.parametrize(
    "name", [f"memplan.api.{name}" for name in api.__all__ if not hasattr(memplan, name)]
)
def test_all_of_api_is_in_the_reference(name: str) -> None:
    assert documented(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{room.__name__}.{name}"
        for room in (equinox, keras, nnx, parallel, stages)
        for name in room.__all__
    ],
)
def test_all_of_a_module_is_in_the_reference(name: str) -> None:
    assert documented(name)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    named = FILE.findall((ROOT / page).read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def test_a_page_ends_with_the_day_and_the_versions_of_its_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which the configuration changes
    stamp = runpy.run_path(str(ROOT / "docs" / "conf.py"))["stamp"]
    for text, wording in (
        ("# A\n```{code-cell} python\n1\n```\n", "code of this page ran"),
        ("# B\n", "page was built"),
    ):
        source = [text]
        stamp(None, "page", source)
        last = source[0].removeprefix(text).split()
        assert wording in " ".join(last) and re.search(
            r"on \d{4}-\d{2}-\d{2}, with memplan", " ".join(last)
        )
        assert f"{importlib.metadata.version('jaxlib')}" in last


def test_all_pages_are_in_a_level_of_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    ]
    listed, trees = index.split("```{toctree}", 1)
    assert sorted(re.findall(r"\]\(([\w/]+)\.md\)", listed)) == sorted({*pages} - {"index"})
    assert re.findall(r"\]\(([\w/]+)\.md\)", listed) == re.findall(
        r"^([\w/]+)$", trees, re.MULTILINE
    )


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_version_is_that_of_the_newest_release() -> None:
    newest = re.search(
        r"^## (\S+) - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest is not None and memplan.__version__ in (newest[1], "0+source")
