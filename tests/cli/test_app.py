"""The command itself: version, help and the demo."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

import memplan
from tests.cli.command import message, run


def test_version_and_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memplan, "__version__", "1.2.3")
    assert run("--version").stdout == "1.2.3\n"
    assert "inspect" in run("--help").stdout
    assert run("unheard-of").exit_code == 2


def demo_in(folder: Path, source: str) -> None:
    room = folder / "experiments" / "applications" / "segmentation"
    room.mkdir(parents=True)
    for package in (room, room.parent, room.parent.parent):
        (package / "__init__.py").touch()
    (room / "demo.py").write_text(textwrap.dedent(source))


def forget_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "experiments" or name.startswith("experiments.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "experiments").is_dir()])


def test_demo_passes_on_what_was_given(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    demo_in(workshop, "def main(**options): print(sorted(options.items())); return 3")
    result = run("demo", "--size", "16", "--steps", "2", "--budget", "80%")
    assert result.exit_code == 3
    assert result.stdout.strip() == "[('budget', '80%'), ('size', 16), ('steps', 2)]"


def test_demo_without_result_is_fine(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    demo_in(workshop, "def main(**options): pass")
    assert run("demo").exit_code == 0


def test_demo_outside_a_checkout_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    assert "in the top folder of a checkout" in message(run("demo"), 2)


def test_demo_names_the_package_it_lacks(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_demo(monkeypatch)
    demo_in(workshop, "import a_reader_of_scans")
    said = message(run("demo"), 2)
    assert "a_reader_of_scans" in said
    assert "pip install '.[demo]'" in said
