"""What strangers meet on GitHub: forms that GitHub reads, and the check that a contributor runs, too."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"

pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="no part of the source distribution")


@pytest.mark.parametrize("name", ["bug", "wish"])
def test_a_form_asks_for_something(name: str) -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] == "textarea"]
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field["validations"]["required"] for field in fields if "validations" in field)
    assert len({field["id"] for field in fields}) == len(fields)


def test_the_form_of_a_bug_and_the_page_name_the_command() -> None:
    form = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    for text in (form, page):
        assert "`memplan report-bug MODULE:FACTORY`" in text and "memplan-bug.zip" in text


def test_github_runs_the_check() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    assert steps[-1] == {"run": ".ci/run"} and (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert steps[1]["with"] == {"python-version-file": ".python-version"}
    assert workflow["permissions"] == {"contents": "read"}


def test_the_check_tests_the_oldest_supported_jax() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [bounds] = [line for line in project["dependencies"] if line.startswith("jax>")]
    oldest, newest = re.findall(r"0\.(\d+)", bounds)
    assert (
        f"oldest={bounds.removeprefix('jax>=').partition(',')[0]}"
        in (ROOT / ".ci" / "run").read_text()
    )
    assert int(newest) - int(oldest) == 2  # the two latest minor releases
    python = (ROOT / ".python-version").read_text().strip()
    assert project["requires-python"] == f">={python}"
