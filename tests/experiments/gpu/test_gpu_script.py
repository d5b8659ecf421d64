"""Rows are kept one by one, go on where they ended, and need no package that a bare machine lacks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu import __main__ as script
from experiments.gpu.card import STAND_IN
from experiments.gpu.rows import MODELS, ROWS, TOY_ROWS, Row
from tests.gpu_runtime import stand_in

LACKING = (
    "nibabel", "orbax", "matplotlib", "perfetto", "grain", "PIL", "ortools", "pytest", "hypothesis", "equinox",
    "playwright", "viztracer", "flatbuffers", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc",
)  # fmt: skip
CARD = {"name": "NVIDIA H100", "how": "NVIDIA H100, driver 580.1", "platform": "gpu", "real": True, "versions": {}}

Answer = Callable[[Row], dict[str, Any]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs the script with rows that answer at once; returns its code and the names of the rows that were asked."""

    def run(answer: Answer, *options: str, card: dict[str, Any] = CARD) -> tuple[int, list[str]]:
        asked: list[str] = []

        def in_a_process(row: Row, folder: Path, limit_s: float) -> dict[str, Any]:
            if row.measure == "card":
                return {"card": card}
            asked.append(row.name)
            return {"pairs": {}, "facts": {}, **answer(row)}

        monkeypatch.setattr(script, "_in_a_process", in_a_process)
        monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), *options])
        return script.main(), asked

    return run


def test_a_failure_is_kept_and_stops_nothing(start: Any, tmp_path: Path) -> None:
    code, asked = start(lambda row: {"error": "ended with code 1: words"} if row is ROWS[1] else {})
    assert code == 1
    assert asked == [row.name for row in ROWS]
    kept = json.loads((tmp_path / "nvidia-h100.json").read_text())
    assert [row["name"] for row in kept if "error" in row] == [ROWS[1].name]
    assert f"### Failed: {ROWS[1].name}" in (tmp_path / "FINDINGS.md").read_text()
    assert start(lambda row: {})[1] == []
    assert start(lambda row: {}, "--again") == (0, [ROWS[1].name])


def test_a_second_call_goes_on_where_the_time_was_over(start: Any) -> None:
    over: Answer = lambda row: {"error": "ran longer than 9 s: ", "late": True} if row is ROWS[2] else {}  # noqa: E731
    _, asked = start(over, "--minutes", "1")  # of which less was left than that row may take
    assert asked == [row.name for row in ROWS[:3]]
    assert start(lambda row: {})[1] == [row.name for row in ROWS[2:]]


def test_every_row_is_kept_before_the_next_begins(start: Any, tmp_path: Path) -> None:
    def answer(row: Row) -> dict[str, Any]:
        path = tmp_path / "nvidia-h100.json"
        known = [one["name"] for one in json.loads(path.read_text())] if path.exists() else []
        assert known == [one.name for one in ROWS[: ROWS.index(row)]]
        return {}

    start(answer)


def test_what_is_no_real_card_is_refused(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = {**CARD, "name": "Stand-in", "how": STAND_IN, "real": False}
    assert start(lambda row: {}, card=card) == (2, [])
    assert "not a real card" in capsys.readouterr().err
    assert start(lambda row: {}, "--toy", card={**card, "platform": "cpu"}) == (2, [])
    assert start(lambda row: {}, "--toy", card=card) == (0, [row.name for row in TOY_ROWS])
    assert start(lambda row: {}, "--report") == (2, [])
    assert "rows are not a real card's" in capsys.readouterr().err


def test_names_are_unique_and_models_known() -> None:
    for rows in (ROWS, TOY_ROWS):
        assert len({row.name for row in rows}) == len(rows)
        assert all(row.model in MODELS for row in rows if row.model)


def test_a_row_that_hangs_is_killed(tmp_path: Path) -> None:
    found = script._in_a_process(TOY_ROWS[0], tmp_path, 0.1)
    assert found["late"]
    assert found["error"].startswith("ran longer than 0 s")


def test_nothing_is_imported_that_a_machine_with_a_card_lacks(tmp_path: Path) -> None:
    """A row's process in an environment without those packages; what does not exist ends it with its words."""
    found = script._in_a_process(Row("a", "no measure", environment=_bare(tmp_path)), tmp_path, 100)
    assert found["error"].startswith("ended with code 1")
    assert found["error"].strip().endswith("KeyError: 'no measure'")


@pytest.mark.slow
def test_a_row_is_measured_without_them(tmp_path: Path) -> None:
    row = Row("a", "planned", "toy-resnet", 0.75, seeds=2, environment=_bare(tmp_path))
    found = script._in_a_process(row, tmp_path, 600)
    facts = found["facts"]
    assert facts["planned: leaves equal to the bit"] == facts["leaves"] > 0
    assert found["pairs"]["compiled_bytes"][0] <= facts["budget_bytes"]
    assert not found["card"]["real"]


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.skipif(stand_in.missing() is not None, reason=str(stand_in.missing()))
def test_toy_rows_run_on_a_stand_in_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.gpu", "--toy", "--out", str(tmp_path), "--rows", "3D U-Net, s"]
    environment = {**os.environ, **stand_in.environment_of()}
    subprocess.run(command, env=environment, cwd=script._ROOT, check=True, timeout=1500)
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())
    assert {row["card"]["how"] for row in rows} == {STAND_IN}
    for row in rows:
        facts = row["facts"]
        assert facts.get("planned: leaves equal to the bit") == facts.get("leaves")
        assert facts.get("passes", True)


_BLOCKED = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {!r}):
            raise ModuleNotFoundError(name + " is not here", name=name)
sys.meta_path.insert(0, Finder())
"""


def _bare(folder: Path) -> dict[str, str]:
    """Environment of a process on a CPU that cannot import them."""
    (folder / "sitecustomize.py").write_text(_BLOCKED.format(LACKING))
    return {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
