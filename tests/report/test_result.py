"""What every result can do: saved whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.report.model import Report


def test_saved_file_follows_a_link(report: Report, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    report.save_json(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").is_file()


def test_nothing_is_left_where_writing_fails(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("disk full")

    path = tmp_path / "report.json"
    path.write_text("older")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        report.save_json(path)
    assert path.read_text() == "older"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_a_missing_folder_is_an_os_error(report: Report, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        report.save_html(tmp_path / "nowhere" / "report.html")
