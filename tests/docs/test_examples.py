"""Every example of the documentation, run whole: one line is memplan's, its budget is kept, and no loss loses a bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))
CHANGED = re.compile(r"^( *).*memplan\..*  # was: (.*)$", re.MULTILINE)


def as_it_was(source: str) -> tuple[str, int]:
    """An example without memplan, and how many lines were changed for it."""
    source = source.replace("import memplan\n", "")
    return CHANGED.subn(lambda found: "" if found[2] == "nothing" else found[1] + found[2], source)


def run(source: str, path: Path) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, path, "exec"), namespace)
    return namespace


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 11


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_one_line_is_memplans(path: Path) -> None:
    plain, changed = as_it_was(path.read_text())
    assert changed == 1
    assert "memplan" not in plain.split('"""', 2)[2]  # behind the docstring


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_as_without_a_budget(path: Path) -> None:
    source = path.read_text()
    planned, plain = run(source, path), run(as_it_was(source)[0], path)
    step = next(planned[name] for name in ("planned", "p_train_step", "train_step") if name in planned)
    assert step.report.planner != "none"
    assert step.report.compiled_peak_bytes <= step.report.budget_bytes
    assert 0.55 < step.report.budget_bytes / step.report.baseline_peak_bytes < 0.75
    assert any(row.decision == "recompute" for row in step.report.decisions)
    assert planned["losses"] == plain["losses"]  # to the last bit
    assert planned["losses"][-1] < planned["losses"][0]
