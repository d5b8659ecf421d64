"""Code of public repositories, imported from clones in one folder.

Nothing of a repository is stored here: a module, a notebook or a nested function is read from the
clone when a step is built. Packages that such a file imports only to load data, log or write
checkpoints (above all TensorFlow) need not be installed: stand-ins replace them during the import.
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

import absl.app  # absl.app and absl.logging define real flags
import absl.logging

VARIABLE = "MEMPLAN_CHECKOUTS"


class MissingCheckoutError(Exception):
    """A clone that a step needs is missing; the message says how to get it."""


@dataclass(frozen=True)
class Repository:
    """A public repository at a commit."""

    name: str  # owner/name on GitHub
    commit: str  # 40 hexadecimal digits
    licence: str  # SPDX identifier

    @property
    def clone(self) -> str:
        """Shell commands that clone it into the current folder."""
        folder = self.name.partition("/")[2]
        return f"git clone https://github.com/{self.name} && git -C {folder} checkout {self.commit}"


def checkouts_folder(folder: str | None = None) -> Path:
    """The folder of all clones, by default from the environment.

    MissingCheckoutError: there is no such folder.
    """
    folder = folder or os.environ.get(VARIABLE)
    if not folder:
        raise MissingCheckoutError(f"where are the clones? Say --checkouts DIR, or set {VARIABLE}.")
    if not Path(folder).is_dir():
        raise MissingCheckoutError(
            f"{folder} is not a folder; README.md beside this module says how to make it."
        )
    return Path(folder)


def folder_of(checkouts: Path, repository: Repository, within: str = "") -> Path:
    """A folder within a clone. MissingCheckoutError: it does not exist."""
    folder = checkouts / repository.name.partition("/")[2] / within
    if not folder.is_dir():
        raise MissingCheckoutError(f"{folder} is missing. In {checkouts}: {repository.clone}")
    return folder


def imported(folder: Path, name: str, stand_ins: Collection[str] = ()) -> Any:
    """The module `name` as a program in `folder` would import it, newly imported each time.

    `stand_ins` are packages to replace by empty ones. Flags that the module defines have their
    defaults, exist in this module only (set them in `FLAGS` or the holder's `value`), and parse no
    command line.
    """
    with _importing(folder, stand_ins):
        return importlib.import_module(name)


def cut(path: Path, function: str, surroundings: Mapping[str, Any]) -> Any:
    """A nested function, compiled alone; `surroundings` are the names that it reads.

    Its decorators (`jax.jit` with shardings) are removed. LookupError: there is no such function,
    or more than one.
    """
    functions = (
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    )
    matches = [node for node in functions if node.name == function]
    if len(matches) != 1:
        raise LookupError(f"{path} has {len(matches)} functions {function}, not one.")
    matches[0].decorator_list = []
    names = dict(surroundings)
    exec(compile(ast.Module(body=[matches[0]], type_ignores=[]), str(path), "exec"), names)
    return names[function]


class Notebook:
    """Cells of a notebook, run by number in one module, whose attributes are the names."""

    def __init__(self, path: Path, stand_ins: Collection[str] = ()) -> None:
        self._path, self._stand_ins = path, stand_ins
        self._sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
        self.names = ModuleType(f"{path.stem}_notebook")
        sys.modules[self.names.__name__] = self.names  # where data classes look up annotations

    def run(self, *cells: int) -> Notebook:
        """Run cells, counted from zero, including text cells."""
        with _importing(self._path.parent, self._stand_ins):
            for cell in cells:
                code = compile(self._sources[cell], f"{self._path}[{cell}]", "exec")
                exec(code, vars(self.names))
        return self

    def set(self, **values: Any) -> Notebook:
        """Set names for cells that run later."""
        vars(self.names).update(values)
        return self


class _StandIn(ModuleType):
    """A module and all of its attributes; calling it or inheriting from it does nothing."""

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
        return (
            ModuleSpec(fullname, self, is_package=True)
            if _stands_in(fullname, self._names)
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Flags(SimpleNamespace):
    """`absl.flags` for one module, whose flags have their defaults."""

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
    return any(name == stand_in or name.startswith(f"{stand_in}.") for stand_in in stand_ins)


@contextmanager
def _importing(folder: Path, stand_ins: Collection[str]) -> Iterator[None]:
    """Import as a fresh interpreter in `folder` would; restores `sys.modules` afterwards."""
    own = {path.stem for path in folder.iterdir()}
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] in own or _stands_in(name, stand_ins):
            del sys.modules[name]
    finder = _StandInFinder(stand_ins)
    sys.meta_path.insert(0, finder)
    try:
        with (
            mock.patch.object(sys, "path", [str(folder), *sys.path]),
            mock.patch.object(absl, "flags", _Flags()),
        ):
            yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):  # keep newly imported libraries
            parent, _, last = name.rpartition(".")
            if name.partition(".")[0] in own:
                del sys.modules[name]
            elif isinstance(sys.modules[name], _StandIn):  # its package has it as an attribute
                vars(sys.modules.get(parent, ModuleType(""))).pop(last, None)
                del sys.modules[name]
        sys.modules.update(before)
