"""Standard output, files, standard error and exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.cli import output
from memplan.errors import BudgetError, InfeasibleBudgetError, MemplanError
from memplan.report.model import Report
from tests.cli.command import REPORT, Planner, message, run


def test_json_alone_on_standard_output(planner: Planner) -> None:
    result = run("inspect", "workshop:make", "--json", "-")
    assert result.exit_code == 0
    assert Report.from_json(result.stdout) == replace(REPORT, step="workshop:make")
    assert json.loads(result.stdout)["schema"] == "memplan.report/1"


def test_files_are_written_beside_the_table(planner: Planner, workshop: Path) -> None:
    result = run("inspect", "workshop:make", "--json", "r.json", "--html", "r.html")
    assert result.exit_code == 0
    assert "device budget" in result.stdout
    assert Report.from_json((workshop / "r.json").read_text()) == replace(
        REPORT, step="workshop:make"
    )
    page = (workshop / "r.html").read_text()
    assert "default-src 'none'" in page and "<script>alert" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            InfeasibleBudgetError(
                "the floor is [9 GiB]", floor_bytes=9, smallest_bytes=10, operation="conv"
            ),
            3,
        ),
        (BudgetError("'5 apples' is not a budget"), 2),
        (MemplanError("there is no planner 'x'"), 2),
        (ZeroDivisionError("inside the step"), 1),
        (OSError("inside the step"), 1),
    ],
)
def test_an_error_is_one_message_and_a_code(
    planner: Planner, workshop: Path, error: Exception, code: int
) -> None:
    planner.error = error
    said = message(run("inspect", "workshop:make", "--json", "r.json"), code)
    assert " ".join(str(error).split()) in said
    assert ("--debug" in said) == (code == 1)
    assert not (workshop / "r.json").exists()


def test_debug_shows_the_traceback(planner: Planner) -> None:
    planner.error = ZeroDivisionError("inside the step")
    result = run("inspect", "workshop:make", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: inside the step" in result.stderr


def test_a_disk_that_fills_up_is_reported(
    planner: Planner, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left on device" in message(
        run("inspect", "workshop:make", "--json", "r.json"), 2
    )
    assert not list(workshop.glob("*r.json*"))


def test_progress_reaches_the_stage_line(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    monkeypatch.setattr(
        output.Stages, "__call__", lambda self, stage, fraction=None: stages.append(stage)
    )
    assert run("inspect", "workshop:make").exit_code == 0
    assert stages == ["loading workshop:make"]
