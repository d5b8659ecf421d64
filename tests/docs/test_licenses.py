"""The table of licenses has each package that pyproject.toml names, and the license that the package says it has."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([\w-]+)` \| (.+) \| (.+) \|$", re.MULTILINE)
TABLE = {
    name: (said, needed)
    for name, said, needed in ROW.findall((ROOT / "docs" / "licenses.md").read_text())
}


def declared() -> dict[str, list[str]]:
    """Packages, and what needs them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependents: dict[str, list[str]] = {}
    for extra, requirements in {
        "": project["dependencies"],
        **project["optional-dependencies"],
    }.items():
        for requirement in requirements:
            if not requirement.startswith("memplan["):
                name = re.split(r"[^\w.-]", requirement)[0]
                dependents.setdefault(name, []).append(f"`{extra}`" if extra else "memplan")
    return dependents


def test_all_dependencies_are_listed_in_order() -> None:
    assert {name: needed.split(", ") for name, (_, needed) in TABLE.items()} == declared()
    assert list(TABLE) == sorted(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_it_is_the_license_that_the_package_says(name: str) -> None:
    try:
        said = importlib.metadata.metadata(name).get("License-Expression")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("of an extra that is not installed")
    assert said in (None, TABLE[name][0])  # None: an old form, without SPDX
