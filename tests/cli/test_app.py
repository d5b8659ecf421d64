"""The command itself: version, help and the demo."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import memplan
from memplan.cli import factory
from tests.cli.command import message, run


def test_version_and_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memplan, "__version__", "1.2.3")
    assert run("--version").stdout == "1.2.3\n"
    assert "inspect" in run("--help").stdout
    assert run("unheard-of").exit_code == 2


@pytest.fixture
def demo_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces memplan's demo by one with this source."""
    name = f"demo_{tmp_path.name}"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(factory, "DEMO", name)
    monkeypatch.setattr(factory, "_DEMO_FOLDERS", (tmp_path / "none", tmp_path))

    def put(source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return put


def test_demo_passes_its_options_on(demo_in: Callable[[str], None]) -> None:
    demo_in("def main(**options): print(sorted(options.items())); return 3")
    result = run("demo", "--size", "16", "--steps", "2", "--budget", "80%")
    assert result.exit_code == 3
    assert result.stdout.strip() == "[('budget', '80%'), ('size', 16), ('steps', 2)]"


def test_demo_without_result_is_fine(demo_in: Callable[[str], None]) -> None:
    demo_in("def main(**options): pass")
    assert run("demo").exit_code == 0


def test_demo_names_the_package_it_lacks(demo_in: Callable[[str], None]) -> None:
    demo_in("import a_reader_of_scans")
    said = message(run("demo"), 2)
    assert "a_reader_of_scans" in said
    assert "pip install 'memplan[demo]'" in said
