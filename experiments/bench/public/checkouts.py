"""Code of public repositories, imported from clones that lie beside each other in one folder.

Nothing of a repository is kept here: a module, a notebook or a function inside another one is read from the clone when
a step is built. What such a file imports only to load data, to log or to write checkpoints (TensorFlow above all) need
not be installed: stand-ins take its place while the file is imported.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import absl.app  # absl.app and absl.logging define flags of their own, real ones
import absl.logging

VARIABLE = "MEMPLAN_CHECKOUTS"


class MissingCheckoutError(Exception):
    """A clone that a step is built from is not there; the message says how to get it."""


@dataclass(frozen=True)
class Repository:
    """A public repository at one commit."""

    name: str  # owner/name on GitHub
    commit: str  # that the steps were written for, 40 hexadecimal digits
    licence: str  # SPDX identifier

    @property
    def clone(self) -> str:
        """Shell commands that fetch it into the current folder."""
        folder = self.name.partition("/")[2]
        return f"git clone https://github.com/{self.name} && git -C {folder} checkout {self.commit}"


def checkouts_folder(told: str | None = None) -> Path:
    """The folder of all clones: as told, else what the environment says; MissingCheckoutError where it is none."""
    told = told or os.environ.get(VARIABLE)
    if not told:
        raise MissingCheckoutError(f"where are the clones? Say --checkouts DIR, or set {VARIABLE}.")
    if not Path(told).is_dir():
        raise MissingCheckoutError(f"{told} is not a folder; README.md beside this module says how to make it.")
    return Path(told)


def folder_of(checkouts: Path, repository: Repository, within: str = "") -> Path:
    """A folder within a clone; MissingCheckoutError where it is not there."""
    folder = checkouts / repository.name.partition("/")[2] / within
    if not folder.is_dir():
        raise MissingCheckoutError(f"{folder} is missing. In {checkouts}: {repository.clone}")
    return folder


def imported(folder: Path, name: str, stand_ins: Collection[str] = ()) -> Any:
    """The module `name` as a program started in `folder` imports it, with modules of its own each time.

    `stand_ins` are modules, with all below them, that are replaced by empty ones. Flags that it defines have their
    defaults, are known to this module alone (`FLAGS` or the holder's `value` change them) and parse no command line.
    """
    with _importing(folder, stand_ins):
        return importlib.import_module(name)


def cut(path: Path, function: str, surroundings: Mapping[str, Any]) -> Any:
    """A function inside another one, compiled by itself; `surroundings` are the names that it reads there.

    Its decorators (`jax.jit` and its shardings) are left off. LookupError: there is no such function, or several.
    """
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    found = [node for node in functions if node.name == function]
    if len(found) != 1:
        raise LookupError(f"{path} has {len(found)} functions {function}, not one.")
    found[0].decorator_list = []
    names = dict(surroundings)
    exec(compile(ast.Module(body=[found[0]], type_ignores=[]), str(path), "exec"), names)
    return names[function]


class Notebook:
    """Cells of a notebook, run by number in one module; names are its attributes."""

    def __init__(self, path: Path, stand_ins: Collection[str] = ()) -> None:
        self._path, self._stand_ins = path, stand_ins
        self._sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
        self.names = ModuleType(f"{path.stem}_notebook")
        sys.modules[self.names.__name__] = self.names  # where its data classes look their annotations up

    def run(self, *cells: int) -> Notebook:
        """Runs cells, counted from zero, those of text too."""
        with _importing(self._path.parent, self._stand_ins):
            for cell in cells:
                code = compile(self._sources[cell], f"{self._path}[{cell}]", "exec")
                exec(code, vars(self.names))
        return self

    def set(self, **values: Any) -> Notebook:
        """Gives names other values, for cells that run later."""
        vars(self.names).update(values)
        return self


class _StandIn(ModuleType):
    """A module, and whatever is asked of it: called, inherited from or annotated with, it does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


class _StandInFinder(MetaPathFinder, Loader):
    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _stands_in(fullname, self._names) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Flags(SimpleNamespace):
    """`absl.flags` for one module: definitions with their defaults."""

    def __init__(self) -> None:
        super().__init__(FLAGS=SimpleNamespace())

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("DEFINE_"):
            raise AttributeError(name)
        is_float = name == "DEFINE_float"

        def define(name: str, default: Any = None, *args: Any, **kwargs: Any) -> Any:
            default = float(default) if is_float and default is not None else default
            setattr(self.FLAGS, name, default)
            return SimpleNamespace(name=name, value=default)

        return define


def _stands_in(name: str, stand_ins: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in stand_ins)


@contextmanager
def _importing(folder: Path, stand_ins: Collection[str]) -> Iterator[None]:
    """The state of a fresh interpreter started in `folder`, for what the folder has; afterwards all is as before."""
    own = {path.stem for path in folder.iterdir()}
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] in own or _stands_in(name, stand_ins):
            del sys.modules[name]
    finder = _StandInFinder(stand_ins)
    sys.meta_path.insert(0, finder)
    try:
        with mock.patch.object(sys, "path", [str(folder), *sys.path]), mock.patch.object(absl, "flags", _Flags()):
            yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):  # libraries that came along stay
            parent, _, last = name.rpartition(".")
            if name.partition(".")[0] in own:
                del sys.modules[name]
            elif isinstance(sys.modules[name], _StandIn):  # its package has it, too
                vars(sys.modules.get(parent, ModuleType(""))).pop(last, None)
                del sys.modules[name]
        sys.modules.update(before)
