"""What is released: a wheel with the package and its demo alone, and a source distribution with all that is tracked."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"memplan-{PROJECT['version']}"
INFORMATION = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
LEFT_OUT = (".ci/", ".github/", ".python-version")  # of the source distribution
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True
    )
    return folder


def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout knows which files are tracked")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    paths = subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {path for path in paths if (ROOT / path).is_file()}


def test_the_wheel_has_the_package_and_its_demo_alone(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if not name.startswith("memplan/demo/")}
        demo = set(wheel.namelist()) - names
    package = {path for path in tracked() if path.startswith("memplan/")}
    assert names == package | {f"{NAME}.dist-info/{name}" for name in INFORMATION}
    assert "memplan/py.typed" in names and "memplan/report/assets/page.js" in names
    assert {name.removeprefix("memplan/demo/") for name in demo} < tracked()
    assert all(name.endswith(".py") for name in demo)


def test_the_source_distribution_has_all_that_is_tracked(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as source:
        names = {name.removeprefix(f"{NAME}/") for name in source.getnames()}
    assert names == {path for path in tracked() if not path.startswith(LEFT_OUT)} | {"PKG-INFO"}


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_outside_of_the_checkout(dist: Path, tmp_path: Path) -> None:
    """Also where the user has a folder `models`."""
    installed, workdir = tmp_path / "installed", tmp_path / "here"
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        wheel.extractall(installed)
    (workdir / "models").mkdir(parents=True)
    (workdir / "models" / "__init__.py").touch()
    command = [
        sys.executable,
        "-P",
        "-c",
        "from memplan.cli import main; main()",
        "demo",
        "--size",
        "16",
    ]
    environment = {**os.environ, "PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--steps", "1"], cwd=workdir, env=environment, capture_output=True, text=True
    )
    # one step of 16 voxels is too small for the resident set to be judged: that is exit code 1
    assert done.returncode in (0, 1) and "the same, to the last bit" in done.stdout, done.stderr


def test_importing_memplan_warns_of_nothing() -> None:
    modules = "memplan, memplan.api, memplan.cli, memplan.nnx, memplan.parallel, memplan.testing"
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {modules}"], cwd=ROOT, check=True)


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["version"] == PROJECT["version"] and cited["license"] == PROJECT["license"]
    released = f"## {cited['version']} - {cited['date-released']}"
    assert released in CHANGELOG.splitlines()


def notes(*version: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".ci" / "notes"), *version]
    return subprocess.run(command, cwd="/", capture_output=True, text=True)


@pytest.mark.parametrize("words", [(), (PROJECT["version"],), ("0.1.0",)])
def test_one_command_prints_the_notes_of_a_release(words: tuple[str, ...]) -> None:
    """They are short, and name no other release."""
    version = words[0] if words else PROJECT["version"]
    printed = notes(*words).stdout.strip()
    assert printed.startswith(f"## {version} - ") and printed in CHANGELOG
    assert printed.count("\n## ") == 0 and 5 < printed.count("\n- ") <= 12
    following = CHANGELOG.split(printed, 1)[1].strip()
    assert following == "" or following.startswith("## ")


def test_a_release_without_notes_is_an_error() -> None:
    assert notes("0.1").returncode == 1 and "no notes of 0.1" in notes("0.1").stderr


def test_the_history_has_every_release() -> None:
    versions = re.findall(r"^## (\d\S+)", CHANGELOG, re.MULTILINE)
    history = (ROOT / "docs" / "history.md").read_text()
    assert re.findall(r"^## (\d\S+)$", history, re.MULTILINE) == versions
