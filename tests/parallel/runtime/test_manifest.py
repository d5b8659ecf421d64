"""Manifests of checkpoints: what is written comes back, and damage and another state are told."""

from __future__ import annotations

import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from memplan.errors import MemplanError
from memplan.parallel.runtime import manifest

LEAVES = {"['w']": jnp.ones((2, 3)), "['n']": jnp.int32(1), "['key']": jax.random.key(0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "data").write_bytes(b"abc")
    (tmp_path / "empty").touch()
    manifest.write(tmp_path, LEAVES)
    return tmp_path


def test_it_names_leaves_and_files(folder: Path) -> None:
    found = manifest.read(folder)
    assert found.files == {"deep/data": (3, zlib.crc32(b"abc")), "empty": (0, 0)}
    assert found.leaves == {"['w']": "float32[2, 3]", "['n']": "int32[]", "['key']": "key<threefry2x32>[]"}
    assert list(found.leaves) == list(LEAVES)


def test_written_again_it_does_not_count_itself(folder: Path) -> None:
    before = manifest.read(folder)
    manifest.write(folder, LEAVES)
    assert manifest.read(folder) == before
    assert {path.name for path in folder.iterdir()} == {"deep", "empty", manifest.NAME}


def test_a_sum_is_that_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 4)
    (tmp_path / "file").write_bytes(content := bytes(range(11)))
    assert manifest.file_sum(tmp_path / "file") == (11, zlib.crc32(content))


@pytest.mark.parametrize(
    "written",
    ["", "{", "[]", "3", "{}", '{"leaves": {}}', '{"files": {}}', '{"leaves": 3, "files": {}}',
     '{"leaves": {}, "files": {"a": 3}}', '{"leaves": {}, "files": {"a": [1]}}',
     '{"leaves": {}, "files": {"a": ["x", 1]}}',
     '{"leaves": {}, "files": []}'],
)  # fmt: skip
def test_damage_is_an_error_that_checkpoints_catch(folder: Path, written: str) -> None:
    (folder / manifest.NAME).write_text(written)
    with pytest.raises(ValueError):  # noqa: PT011 what it says is io's
        manifest.read(folder)


def test_a_missing_one_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        manifest.read(tmp_path)


def test_the_same_state_passes(folder: Path) -> None:
    manifest.check_same(manifest.read(folder), LEAVES, folder)


def test_what_differs_is_named_with_both_types(folder: Path) -> None:
    wanted = {"['w']": jnp.ones((2, 4)), "['n']": jnp.int32(1), "['m']": jnp.ones(1)}
    with pytest.raises(MemplanError) as error:
        manifest.check_same(manifest.read(folder), wanted, folder)
    for told in (
        "state['w']: float32[2, 3], wanted float32[2, 4]",
        "state['key']: key<threefry2x32>[], wanted not",
        "state['m']: not saved, wanted float32[1]",
    ):
        assert told in str(error.value)
    assert "['n']" not in str(error.value)


def test_of_many_differences_a_few_are_shown(folder: Path) -> None:
    wanted = {**LEAVES, **{f"[{n}]": jnp.ones(1) for n in range(7)}}
    with pytest.raises(MemplanError, match=r"state\[4\].*, and 2 more\. Was it"):
        manifest.check_same(manifest.read(folder), wanted, folder)
