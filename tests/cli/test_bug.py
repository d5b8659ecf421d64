"""A bug report: what it holds for a step that works and for one that fails, and what it never holds."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplan import api
from memplan.cli import bug
from memplan.report.model import Report
from tests.cli.command import message, run

ROOT = Path(__file__).parents[2]
SECRETS = ("Zo", "Roe", "10.0.0.1", "12345", "23456", str(ROOT), sys.prefix, str(Path.home()))

MODULE = """
import jax, jax.numpy as jnp, numpy as np

TABLE = np.asarray([12345.0, 23456.0, 34567.0], np.float32)  # elements of an array

def works():
    def step(w, x):
        return w * x + TABLE, (w * x).sum()
    return step, (jnp.ones(3), jnp.ones(3))

def fails():
    def step(w, x):
        raise RuntimeError("the loss of " + __file__)
    return step, (jnp.ones(3), jnp.ones(3))

def no_factory():
    raise OSError("no data in " + __file__)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory: a user's project in a home folder, with a module `buggy`."""
    home = tmp_path / "Zoë Roe"
    folder = home / "projects"
    folder.mkdir(parents=True)
    (folder / "buggy.py").write_text(MODULE)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MEMPLAN_COORDINATOR", "10.0.0.1:80")
    monkeypatch.setenv("JAX_OF_A_TEST", f"--to={home}/here")
    monkeypatch.chdir(folder)
    yield folder
    sys.modules.pop("buggy", None)


def written(*words: str) -> dict[str, str]:
    """The files of the report that the command writes; none has a secret."""
    result = run("report-bug", *words)
    assert result.exit_code == 0, result.output
    with zipfile.ZipFile("memplan-bug.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert "Look at these files" in result.stdout
    assert set(texts) <= set(result.stdout.splitlines())
    for name, text in texts.items():
        assert not [secret for secret in SECRETS if secret in text], name
    return texts


def test_a_step_that_works() -> None:
    texts = written("buggy:works", "--donate", "none", "--budget", "1MiB")
    report = Report.from_json(texts.pop("report.json"))
    about = json.loads(texts.pop("about.json"))
    assert about["step"] == "buggy:works"
    assert about["options"]["donate"] == "none" and about["budget"] == "1MiB"
    assert about["versions"].items() >= dict(report.versions).items()
    assert about["device"]["kind"] == report.runs_on and about["os"]
    assert about["variables"]["MEMPLAN_COORDINATOR"] == "(set)"
    assert about["variables"]["JAX_OF_A_TEST"] == "--to=.../here"
    assert "HOME" not in about["variables"]
    assert len(texts) == 8 and all(name.startswith("forms/") for name in texts)
    assert "buggy.py" in texts["forms/3-module.txt"]
    assert "constant({...})" in texts["forms/3-module.txt"]


@pytest.mark.parametrize(
    ("factory", "error"),
    [("fails", "RuntimeError: the loss of"), ("no_factory", "OSError: no data in")],
)
def test_a_step_that_fails(factory: str, error: str) -> None:
    texts = written(f"buggy:{factory}")
    assert texts.keys() == {"about.json", "error.txt"}
    assert f"{error} .../buggy.py" in texts["error.txt"]
    assert 'File ".../buggy.py"' in texts["error.txt"]
    assert 'File ".../memplan/cli/' in texts["error.txt"]


def test_a_budget_that_nothing_fits() -> None:
    assert "InfeasibleBudgetError" in written("buggy:works", "--budget", "1")["error.txt"]


def test_a_process_that_ends_leaves_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """As XLA does when a check of its own fails."""

    class Ending:
        def plan(self, *args: object) -> None:
            raise SystemExit

    monkeypatch.setattr(api, "jit", lambda step, **options: Ending())
    run("report-bug", "buggy:works")
    with zipfile.ZipFile("memplan-bug.zip") as archive:
        assert "process ended" in archive.read("error.txt").decode()


def test_forms_that_are_too_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug, "_MOST_CHARACTERS", 1000)
    texts = written("buggy:works")
    assert texts["forms/3-module.txt"].endswith(" characters")
    assert len(texts["forms/8-verdict.txt"]) > 50


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in '/data/my project/net.py': no", "in '.../net.py': no"),
        ("at /scratch/al/net.py:3", "at .../net.py:3"),
        ("--to=/scratch/al,/scratch/b/c", "--to=.../al,.../c"),
        ("file:///scratch/al/net.py", "file://.../net.py"),
        ("jit(step)/jvp()/while/body/dot", "jit(step)/jvp()/while/body/dot"),
        ("https://docs.jax.dev/en/latest/", "https://docs.jax.dev/en/latest/"),
        ("1 / 2, models/net.py", "1 / 2, models/net.py"),
    ],
)
def test_folders_are_left_out(text: str, expected: str) -> None:
    assert bug._without_folders(text) == expected


def test_wrong_usage_writes_nothing(project: Path) -> None:
    assert "does not name a factory" in message(run("report-bug", "buggy"), 2)
    assert "positions" in message(run("report-bug", "buggy:works", "--donate", "7"), 2)
    assert "cannot be written" in message(run("report-bug", "buggy:works", "--out", "no/a.zip"), 2)
    assert list(project.glob("*.zip")) == []
