"""JSON as results have it: led by its schema, a row to a line."""

from __future__ import annotations

import json

import pytest

from memplan.report import document
from memplan.report.model import Report


def test_json_has_a_row_to_a_line(drawn_report: Report) -> None:
    lines = drawn_report.to_json().splitlines()
    assert drawn_report.timeline is not None
    for row in ("start_s", "place", "direction"):
        rows = [line for line in lines if f'"{row}":' in line and line.lstrip().startswith("{")]
        assert rows and all(json.loads(line.strip().removesuffix(",")) for line in rows)
    assert len([line for line in lines if '"place":' in line]) == len(drawn_report.timeline.stays)
