"""Stages: silent while quick, then a line each; in a terminal a bar that disappears."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from memplan.report.progress import Stages


def run(patience_s: float, *, terminal: bool = False, lines: bool = False) -> str:
    out = io.StringIO()
    with Stages(
        Console(file=out, force_terminal=terminal, width=80), patience_s, lines=lines
    ) as stage:
        stage("planning [a]", None)
        stage("compiling", 0.25)
        stage("compiling", 0.5)
    return out.getvalue()


class Passed:
    """A timer whose seconds have passed when it starts."""

    def __init__(self, seconds: float, call: Callable[[], None]):
        self.start = call

    def cancel(self) -> None:
        pass

    join = cancel


def test_quick_work_leaves_no_trace() -> None:
    assert run(patience_s=60) == ""


def test_slow_work_names_each_stage_once() -> None:
    assert run(patience_s=0) == "memplan: planning [a]\nmemplan: compiling\n"


def test_a_terminal_stays_empty_while_work_is_quick() -> None:
    assert run(patience_s=60, terminal=True) == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.report.progress.Timer", Passed)
    drawn = run(patience_s=60, terminal=True)
    assert "compiling" in drawn
    assert "memplan: compiling" not in drawn


def test_a_terminal_may_have_lines() -> None:
    assert run(patience_s=0, terminal=True, lines=True).count("memplan: ") == 2
