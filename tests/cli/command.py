"""The command called from Python, and a planner that stands in for memplan.jit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typer.testing import CliRunner, Result

from memplan.cli import app as cli
from memplan.report.model import LiveValue, Report
from tests.report.plain import plain_report

REPORT = plain_report(
    status="fits",
    planner="greedy",
    budget_bytes=2**30,
    host_budget_bytes=2**31,
    baseline_peak_bytes=2**31,
    predicted_peak_bytes=2**29,
    compiled_peak_bytes=2**29,
    predicted_step_s=0.2,
    live_at_peak=(LiveValue("<script>alert(1)</script>", 7, "f32[1]", "net.py:3", "keep"),),
)


@dataclass
class Planner:
    """Stands in for `memplan.jit`: records its options, and returns `report` or raises `error`."""

    report: Report = REPORT
    error: Exception | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    args: tuple[Any, ...] = ()

    def jit(self, step: Callable[..., Any], **options: Any) -> Planner:
        self.requests.append(options)
        if self.error is not None:
            raise self.error
        return self

    def __call__(self, *args: Any) -> None:
        raise AssertionError("the command never runs the step")

    def plan(self, *args: Any) -> Planner:
        self.args = args
        return self


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def message(result: Result, code: int) -> str:
    """The message of a run that failed with `code` and printed nothing to standard output."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())
