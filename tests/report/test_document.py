"""JSON of results: the schema first, one row per line."""

import json
from typing import Any

import pytest

from memplan.report import document
from memplan.report.model import Report


def test_json_has_one_row_per_line(drawn_report: Report) -> None:
    lines = drawn_report.to_json().splitlines()
    assert drawn_report.timeline is not None
    for row in ("start_s", "place", "direction"):
        rows = [line for line in lines if f'"{row}":' in line and line.lstrip().startswith("{")]
        assert rows and all(json.loads(line.strip().removesuffix(",")) for line in rows)
    assert len([line for line in lines if '"first":' in line]) == len(drawn_report.timeline.stays)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"a": None, "b": [], "c": {}, "d": [1, 2], "e": '"\n\u2028<'},
        {"rows": [{"a": [1, [2]]}, {}], "deep": {"x": {"y": [[1, 2], [3]]}}},
    ],
)
def test_json_is_read_as_it_was_written(entries: dict[str, Any]) -> None:
    written = document.write(entries, "mine/1")
    assert document.read(written, "mine/1") == {"schema": "mine/1", **entries}
    assert written.startswith(('{"schema": "mine/1"', '{\n  "schema": "mine/1"'))


def test_objects_in_arrays_and_arrays_of_numbers_take_a_line_each() -> None:
    written = document.write(
        {"one": [{"a": 1, "b": [2]}, {"a": 3}], "two": {"x": [[1, 2], [3]], "y": 4}}, "s"
    )
    assert written.splitlines() == [
        "{",
        '  "schema": "s",',
        '  "one": [',
        '    {"a": 1, "b": [2]},',
        '    {"a": 3}',
        "  ],",
        '  "two": {',
        '    "x": [',
        "      [1, 2],",
        "      [3]",
        "    ],",
        '    "y": 4',
        "  }",
        "}",
    ]


@pytest.mark.parametrize("text", ["", '{"schema": "s"', "[" * 100_000, '{"schema": "s"} more'])
def test_truncated_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON .*truncated"):
        document.read(text, "s")


@pytest.mark.parametrize(
    ("text", "schema"), [("[]", None), ("3", None), ("{}", None), ('{"schema": "s/1"}', "s/1")]
)
def test_another_schema_is_named(text: str, schema: str | None) -> None:
    with pytest.raises(ValueError, match=f"schema {schema!r}, not 's/2'"):
        document.read(text, "s/2")
