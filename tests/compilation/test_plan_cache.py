"""Kept plans: found again, made again where damaged, bounded, and no hindrance where there is no folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memplan.compilation import plan_cache
from memplan.planning.plan import Plan
from memplan.planning.schedule import Kind

PLAN = Plan(((Kind.RUN, "fusion"),), "f00d", "kernels", "cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


def test_what_is_kept_is_found(folder: Path) -> None:
    assert plan_cache.find("a") is None
    plan_cache.keep("a", PLAN)
    assert plan_cache.find("a") == PLAN
    assert plan_cache.find("b") is None
    assert os.listdir(folder) == ["a.json"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1}', b"\xff\xfe"])
def test_a_damaged_one_is_warned_of_and_made_again(folder: Path, content: bytes) -> None:
    plan_cache.keep("a", PLAN)
    (folder / "a.json").write_bytes(content)
    with pytest.warns(UserWarning, match=r"a\.json"):
        assert plan_cache.find("a") is None
    plan_cache.keep("a", PLAN)
    assert plan_cache.find("a") == PLAN


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST", 3)
    for number, name in enumerate("abc"):
        plan_cache.keep(name, PLAN)
        os.utime(folder / f"{name}.json", (number, number))
    assert plan_cache.find("a") == PLAN  # used: the youngest now
    plan_cache.keep("d", PLAN)
    assert {path.stem for path in folder.iterdir()} == {"a", "c", "d"}


def test_all_that_a_plan_depends_on_names_it() -> None:
    assert plan_cache.key("module", 10) == plan_cache.key("module", 10)
    assert len({plan_cache.key("module", 10), plan_cache.key("module", 11), plan_cache.key("other", 10)}) == 3


@pytest.mark.parametrize("named", ["off", "0", ""])
def test_it_may_be_off(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("MEMPLAN_CACHE", named)
    assert plan_cache.folder() is None
    plan_cache.keep("a", PLAN)
    assert plan_cache.find("a") is None


def test_by_default_it_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEMPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_cache.folder() == tmp_path / "memplan" / "plans"


def test_a_folder_that_may_not_be_written_to_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "file" / "plans"))
    plan_cache.keep("a", PLAN)
    assert plan_cache.find("a") is None
