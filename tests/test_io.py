"""A file is there whole, or as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.io import write_whole


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_whole(path, "before")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            write_whole(path, "after")
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "file", "after")
