"""Checkpoints that another number of processes can go on from: Orbax writes and reads, every file has its sum.

A folder `000000120` holds one step, and its manifest, written last, what belongs to it. Orbax by itself would read a
file with flipped bits without a word, and would turn one dtype into another.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memplan.errors import MemplanError
from memplan.parallel.runtime import manifest
from memplan.parallel.runtime.manifest import Manifest


class Checkpoints:
    """The checkpoints in one folder, which all processes share. All processes make the same calls.

    Attributes:
      folder: made when it is missing.
      every: `save` writes the steps that this divides.
      keep: how many stay; older ones are removed after a newer one is complete.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, keep: int = 3):
        if every < 1 or keep < 1:
            raise MemplanError(f"every={every} and keep={keep} must be at least 1.")
        self.folder = Path(folder).absolute()
        self.every = every
        self.keep = keep

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Write the state, complete or not at all, and return when it is on disk. False where the step is not due.

        Raises:
          MemplanError: a leaf is no array, or is one of this process alone; the folder cannot be written.
        """
        if not force and step % self.every:
            return False
        leaves = _named_leaves(state)
        target = self.folder / f"{step:09d}"
        arrays = {f"{number:05d}": leaf for number, leaf in enumerate(leaves.values())}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            orbax = _orbax()
            with _checkpointer() as checkpointer:
                checkpointer.save(target, args=orbax.args.StandardSave(arrays), force=True)
            if jax.process_index() == 0:
                manifest.write(target, leaves)
                self._remove_old()
            if jax.process_count() > 1:  # Orbax's last barrier is before the manifest, and all may restore it at once
                multihost_utils.sync_global_devices(f"memplan saved {target.name}")
        except OSError as error:
            raise MemplanError(f"Step {step} cannot be saved in {self.folder}: {error}.") from error
        return True

    def steps(self) -> list[int]:
        """The complete steps that this process sees, oldest first."""
        return sorted(int(path.parent.name) for path in self.folder.glob(f"[0-9]*/{manifest.NAME}"))

    def latest(self) -> int | None:
        """The newest complete step, the same for all processes; None where there is none."""
        newest = max(self.steps(), default=-1)
        if jax.process_count() > 1:
            newest = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
        return None if newest < 0 else newest

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """The newest step, or this one, with its state in the structure and the shardings of `like`.

        Args:
          like: arrays or `jax.ShapeDtypeStruct`s with shardings, on any mesh: not only the one that saved.

        Raises:
          MemplanError: there is no checkpoint; it holds other names, shapes or dtypes; a file of it is damaged or
            missing. The one before is never taken in its place without being asked for.
        """
        step = self.latest() if step is None else step
        if step is None or not (self.folder / f"{step:09d}").is_dir():
            which = "no complete checkpoint" if step is None else f"no step {step}"
            raise MemplanError(f"There is {which} in {self.folder}; it holds the steps {self.steps()}.")
        source = self.folder / f"{step:09d}"
        try:
            saved = manifest.read(source)
        except (OSError, ValueError) as error:
            raise MemplanError(
                self._damaged(source / manifest.NAME, f"{type(error).__name__}: {error}", step)
            ) from error
        wanted = _named_leaves(like)
        manifest.check_same(saved, wanted, source)
        self._check_files(source, saved, step)
        numbers = {name: f"{number:05d}" for number, name in enumerate(saved.leaves)}
        abstract = {
            numbers[name]: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in wanted.items()
        }
        orbax = _orbax()
        try:
            with _checkpointer() as checkpointer:
                arrays = checkpointer.restore(source, args=orbax.args.StandardRestore(abstract))
        except Exception as error:
            raise MemplanError(self._damaged(source, str(error).splitlines()[0][:300], step)) from error
        return step, jax.tree.unflatten(jax.tree.structure(like), [arrays[number] for number in abstract])

    def _check_files(self, source: Path, saved: Manifest, step: int) -> None:
        """Each process reads its share; one that finds damage fails, and the watch tells the others."""
        for name, written in list(saved.files.items())[jax.process_index() :: jax.process_count()]:
            path = source / name
            try:
                what = "" if manifest.file_sum(path) == written else "its bytes are not those that were written"
            except OSError as error:
                what = error.strerror or str(error)
            if what:
                raise MemplanError(self._damaged(path, what, step))

    def _damaged(self, path: Path, what: str, step: int) -> str:
        others = [other for other in self.steps() if other != step]
        instead = f"take an older one with restore(like, step={max(others)})" if others else "there is no older one"
        return (
            f"Checkpoint {step} is damaged: {path}: {what}. Restore that file from a copy, or remove the folder, or "
            f"{instead}. If only some hosts say so, the folder is not on a file system that all of them share."
        )

    def _remove_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"{step:09d}")
        for left_by_a_killed_save in self.folder.glob("[0-9]*.orbax-checkpoint-tmp*"):
            shutil.rmtree(left_by_a_killed_save, ignore_errors=True)


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MemplanError("Checkpoints need Orbax: pip install 'memplan[parallel]'.") from error
    return orbax.checkpoint


def _checkpointer() -> Any:
    orbax = _orbax()
    return orbax.Checkpointer(orbax.StandardCheckpointHandler())


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.sharding is None:
            raise MemplanError(
                f"state{name} is {_type(leaf)}: checkpoints hold jax arrays. Make it one with jax.numpy.asarray, or "
                "give its jax.ShapeDtypeStruct a sharding."
            )
        if jax.process_count() > 1 and leaf.sharding.is_fully_addressable:
            raise MemplanError(
                f"state{name} is on devices of this process alone, so each of {jax.process_count()} processes has a "
                "value of its own. Put it on the mesh of all, whole with jax.NamedSharding(mesh, jax.P())."
            )
    return leaves


def _type(leaf: Any) -> str:
    return type(leaf).__name__ + (" without a sharding" if isinstance(leaf, jax.ShapeDtypeStruct) else "")
