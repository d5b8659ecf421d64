"""Results are saved atomically, drawn as text and pages, and loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from memplan.report.model import Report
from memplan.report.result import Record, Versions
from memplan.report.views.table import Table


@dataclass(frozen=True)
class Rows(Record):
    """One row of a table for each number."""

    SCHEMA: ClassVar[str] = "memplan.rows/1"

    numbers: tuple[int, ...]
    versions: Versions = ()

    @property
    def title(self) -> str:
        return "a <title>"

    def tables(self, rows: int) -> tuple[Table, ...]:
        return (Table("", ("",), tuple((f"row {number}",) for number in self.numbers[:rows])),)


def test_saved_file_follows_a_link(report: Report, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    report.save_json(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").is_file()


def test_a_missing_folder_is_an_os_error(report: Report, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        report.save_html(tmp_path / "nowhere" / "report.html")


def test_a_record_loads_its_versions_from_an_object() -> None:
    record = Rows((1, 2), (("jax", "0.11.2"), ("python", "3.12.1")))
    assert json.loads(record.to_json())["versions"] == {"jax": "0.11.2", "python": "3.12.1"}
    assert Rows.from_json(record.to_json()) == record


def test_the_error_about_a_damaged_record_names_the_entry() -> None:
    document = {"schema": Rows.SCHEMA, "numbers": [1, "two"], "versions": {}}
    with pytest.raises(ValueError, match=r"damaged \(its 'numbers\[1\]' is 'two'"):
        Rows.from_json(json.dumps(document))
    with pytest.raises(ValueError, match=r"damaged \(it has no entry 'numbers'"):
        Rows.from_json(json.dumps({"schema": Rows.SCHEMA}))


def test_text_has_fewer_rows_than_notebooks_and_those_fewer_than_pages(tmp_path: Path) -> None:
    record = Rows(tuple(range(1000)))
    record.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page == record.to_html() and "<h1>a &lt;title&gt;</h1>" in page
    counts = [drawn.count("row ") for drawn in (str(record), record._repr_html_(), page)]
    assert counts == sorted(set(counts)) and counts[-1] < 1000
