"""Tables in a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from memplan.report.model import Report
from memplan.report.views import text
from memplan.report.views.table import Table


def test_text_is_plain_and_takes_names_literally(report: Report) -> None:
    text = str(report)
    assert "\x1b" not in text
    assert "state.params['w']" in text
    assert max(map(len, text.splitlines())) <= 120


def test_rich_draws_the_report(report: Report) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report)
    assert "recomputed in a step" in console.export_text()
