"""The skill for coding assistants: its commands end as it says, and the fields that it names are in the JSON."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import run

SKILL = (Path(__file__).parents[2] / "skills" / "memplan" / "SKILL.md").read_text()
COMMANDS = re.findall(r"^memplan (.*?) +# exit (\d)", SKILL, re.MULTILINE)
FIELD = re.compile(r"`([a-z_]+(?:\[\])?(?:\.[a-z_]+)?)`")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory with the skill's `train.py`."""
    (tmp_path / "train.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("train", None)


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", SKILL, re.DOTALL)[0]


def fields(start: str, end: str) -> list[str]:
    """The names that stand in the first cells of a table, or in a sentence, between two texts."""
    text = SKILL.split(start, 1)[1].split(end, 1)[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return FIELD.findall(" ".join(cells) or text)


def has(document: dict[str, Any], field: str) -> bool:
    name, _, inner = field.partition("[].")
    return name in document and (not inner or all(inner in row for row in document[name] or [{}]))


def test_it_is_a_skill_of_one_page() -> None:
    _, head, _ = SKILL.split("---\n", 2)
    described = yaml.safe_load(head)
    assert described.keys() == {"name", "description"} and described["name"] == "memplan"
    assert len(described["description"]) <= 1024 and len(SKILL.splitlines()) < 150


def test_every_command_says_how_it_ends() -> None:
    written = [line for line in block("sh").splitlines() if line.startswith("memplan")]
    assert len(COMMANDS) == len(written) > 5


def test_the_fields_are_in_a_report(here: Path) -> None:
    assert (
        run(
            "inspect",
            "train:make_step(batch=512, width=64)",
            "--budget",
            "1MiB",
            "--json",
            "r.json",
        ).exit_code
        == 0
    )
    report, named = (
        json.loads((here / "r.json").read_text()),
        fields("Fields of `report.json`", "\n\nOf `doctor.json`"),
    )
    assert report["planner"] != "none" and len(named) > 15
    assert not [field for field in named if not has(report, field)]


@pytest.mark.gpu_aot
@pytest.mark.slow
def test_the_commands_end_as_it_says(here: Path) -> None:
    for command, code in COMMANDS:
        assert run(*shlex.split(command)).exit_code == int(code), command
    for path, end in (("doctor", "Of `largest.json`"), ("largest", "\n\n")):
        document = json.loads((here / f"{path}.json").read_text())
        named = fields(f"Of `{path}.json`:", end)
        assert len(named) > 2
        assert not [field for field in named if not has(document, field)]
