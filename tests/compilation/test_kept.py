"""Entries in jax's persistent cache: found again, reported where damaged, and none where the cache is off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from memplan.compilation import kept
from memplan.compilation.kept import Kept
from tests.disk_cache import disk_cache

ENTRY = Kept("key_0", True, '{"format": 5}', "{}")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with disk_cache(tmp_path):
        yield tmp_path


def test_what_is_kept_is_found(folder: Path) -> None:
    assert kept.find("a") is None
    kept.keep("a", ENTRY, 1.0)
    assert kept.find("a") == ENTRY
    assert kept.find("b") is None


def test_what_jax_would_make_again_is_not_kept(folder: Path) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 2.0)
    kept.keep("a", ENTRY, 1.9)
    assert kept.find("a") is None
    kept.keep("a", ENTRY, 2.0)
    assert kept.find("a") == ENTRY


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"format": 99}', b'{"format": 1, "name": 3}', b"\xff\xfe", b"[" * 10**5],
    ids=len,
)
def test_a_damaged_one_is_told(folder: Path, content: bytes) -> None:
    kept.keep("a", ENTRY, 1.0)
    (path,) = folder.glob("memplan-a*-cache")
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="memplan-a of jax's compilation cache is damaged"):
        assert kept.find("a") is None


def test_without_jaxs_cache_nothing_is_kept(tmp_path: Path) -> None:
    kept.keep("a", ENTRY, 1.0)
    assert kept.find("a") is None


def test_all_that_a_plan_depends_on_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {kept.digest("step", 10), kept.digest("step", 11), kept.digest("other", 10)}
    assert len(digests) == 3 and kept.digest("step", 10) in digests
    monkeypatch.setattr(kept.io, "version_of", lambda name: "another")
    assert kept.digest("step", 10) not in digests
    monkeypatch.undo()
    monkeypatch.setattr(kept, "_code", lambda: "another")
    assert kept.digest("step", 10) not in digests
