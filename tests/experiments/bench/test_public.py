"""The table of public steps, and the import of code from clones (fake ones, no network)."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from experiments.bench.cases import PUBLIC, PUBLIC_MESHES
from experiments.bench.public.checkouts import (
    VARIABLE,
    MissingCheckoutError,
    Notebook,
    Repository,
    checkouts_folder,
    cut,
    folder_of,
    imported,
)
from experiments.bench.public.mesh_steps import DEVICES, MESH_STEPS, MeshStep
from experiments.bench.public.steps import STEPS, PublicStep
from experiments.bench.tables import README
from memplan.hardware import catalog
from memplan.hardware.topology import topology_named


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_there_are_at_least_fifteen_of_five_repositories() -> None:
    assert len(STEPS) >= 15
    assert len({step.repository.name for step in STEPS.values()}) == 5


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_both_sizes_are_in_the_words_of_the_builder(step: PublicStep) -> None:
    for size in (step.full, step.small):
        inspect.signature(step.build).bind(Path(), lambda build: build(), **size)
    assert set(step.full) <= set(step.small)


@pytest.mark.parametrize("step", (STEPS | MESH_STEPS).values(), ids=STEPS | MESH_STEPS)
def test_a_step_says_where_it_is_from(step: PublicStep | MeshStep) -> None:
    repository = step.repository
    assert len(repository.commit) == 40 and int(repository.commit, 16)
    assert repository.name.count("/") == 1
    assert catalog.named(step.device).target is not None
    readme = README.read_text()
    assert repository.clone in readme
    assert f"| {step.name} | {step.path} | {repository.licence} | {step.ours} |" in readme


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_missing_clone_says_how_to_get_it(step: PublicStep, tmp_path: Path) -> None:
    for factory in (step.factory(tmp_path), step.small_factory(tmp_path)):
        with pytest.raises(MissingCheckoutError, match=step.repository.commit):
            factory()


@pytest.mark.parametrize("step", MESH_STEPS.values(), ids=MESH_STEPS)
def test_so_does_one_over_a_mesh(step: MeshStep, tmp_path: Path) -> None:
    with pytest.raises(MissingCheckoutError, match=step.repository.commit):
        step.build(tmp_path)
    assert topology_named(step.topology).devices == DEVICES
    assert PUBLIC_MESHES[f"{step.name}-70"].facts == {"topology": step.topology}


def test_the_folder_is_told_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(MissingCheckoutError, match=VARIABLE):
        checkouts_folder(None)
    with pytest.raises(MissingCheckoutError, match="nowhere"):
        checkouts_folder(str(tmp_path / "nowhere"))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert checkouts_folder(None) == tmp_path
    assert checkouts_folder(str(tmp_path.parent)) == tmp_path.parent


def test_every_step_is_asked_for_half_first_and_for_more_where_that_does_not_fit() -> None:
    assert len(PUBLIC) == 3 * len(STEPS)
    first = [name for name, case in PUBLIC.items() if case.after is None]
    assert first == [f"{step.name}-{step.device}-50" for step in STEPS.values()]
    assert PUBLIC["flax-vae-v100-75"].after == ("flax-vae-v100-60", False)
    assert PUBLIC["flax-vae-v100-60"].after == ("flax-vae-v100-50", False)


def test_a_folder_of_a_repository(tmp_path: Path) -> None:
    repository = Repository("someone/thing", "0" * 40, "MIT")
    with pytest.raises(MissingCheckoutError, match="git clone"):
        folder_of(tmp_path, repository, "examples")
    inner = write(tmp_path / "thing" / "examples")
    assert folder_of(tmp_path, repository, "examples") == inner


def test_equal_names_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    before = dict(sys.modules)
    for number in (1, 2):
        write(tmp_path / str(number), train="import models", models=f"SIZE = {number}")
    first, second = (imported(tmp_path / str(number), "train") for number in (1, 2))
    assert (first.models.SIZE, second.models.SIZE) == (1, 2)
    assert sys.modules == before
    assert not any(str(tmp_path) in entry for entry in sys.path)


def test_a_module_of_the_project_hides_none_of_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "models", sys)
    assert (
        imported(write(tmp_path, train="import models", models="SIZE = 3"), "train").models.SIZE
        == 3
    )
    assert sys.modules["models"] is sys


def test_packages_are_whole_after_the_import(tmp_path: Path) -> None:
    write(tmp_path / "thing", __init__="from thing import inner", inner="SIZE = 4")
    assert imported(tmp_path, "thing").inner.SIZE == 4
    assert "thing" not in sys.modules and "thing.inner" not in sys.modules


def test_stand_ins_do_nothing_and_leave_nothing(tmp_path: Path) -> None:
    text = """
import heavy.data as data
from heavy import log
import email.heavier
class Set(data.Set("x")): pass
def load(kind: data.Kind | None = None, size: int | data.Size = 0, *more: dict[str, data.Kind]): return kind
AUTO = data.AUTO(1).more
"""
    module = imported(write(tmp_path, train=text), "train", ("heavy", "email.heavier"))
    assert module.load() is None
    assert not {"heavy", "heavy.data", "heavy.log", "email.heavier"} & set(sys.modules)
    assert not hasattr(sys.modules["email"], "heavier")


def test_what_is_no_stand_in_must_be_there(tmp_path: Path) -> None:
    write(tmp_path, train="import heavy_and_missing")
    with pytest.raises(ModuleNotFoundError, match="heavy_and_missing"):
        imported(tmp_path, "train", ("heavy",))
    assert not any(type(finder).__name__ == "_StandInFinder" for finder in sys.meta_path)


def test_flags_are_defined_twice_without_a_clash(tmp_path: Path) -> None:
    text = """
from absl import flags
FLAGS = flags.FLAGS
flags.DEFINE_float("rate", 2, help="")
WIDTH = flags.DEFINE_integer("width", 3, "")
PATH = flags.DEFINE_string("path", None, "", required=True)
"""
    first, second = (imported(write(tmp_path, train=text), "train") for _ in range(2))
    first.FLAGS.rate = 5.0
    assert (first.FLAGS.rate, second.FLAGS.rate, second.WIDTH.value, second.PATH.value) == (
        5.0,
        2.0,
        3,
        None,
    )
    assert isinstance(second.FLAGS.rate, float)


def test_a_function_is_cut_out_of_another(tmp_path: Path) -> None:
    text = """
def main():
    seen = []
    @unknown(seen)
    def update(x):
        return model(x) + 1
"""
    path = write(tmp_path, train=text) / "train.py"
    update = cut(path, "update", {"model": lambda x: 10 * x})
    assert update(2) == 21
    assert (update.__code__.co_filename, update.__code__.co_firstlineno) == (str(path), 5)
    with pytest.raises(LookupError, match="0 functions missing"):
        cut(path, "missing", {})


def test_cells_run_in_one_module_with_values_set_between(tmp_path: Path) -> None:
    cells = ["size = 4\n", "text", "import heavy\nclass Net:\n    size: heavy.Int = size\n"]
    quoted = ", ".join(f'{{"source": [{cell!r}]}}'.replace("'", '"') for cell in cells)
    path = tmp_path / "net.ipynb"
    path.write_text(f'{{"cells": [{quoted}]}}')
    assert Notebook(path, ("heavy",)).run(0, 2).names.Net.size == 4
    assert Notebook(path, ("heavy",)).run(0).set(size=5).run(2).names.Net.size == 5
