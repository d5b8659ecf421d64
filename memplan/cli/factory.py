"""`MODULE:FACTORY(size=64)` on the command line: the user's step, and the demo, found by name at
run time.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from memplan.errors import MemplanError

DEMO = "experiments.applications.segmentation.demo"
_MEMPLAN = Path(__file__).parents[1]
# The demo's sources are in a folder of the package in a wheel, and beside it in a checkout.
_DEMO_FOLDERS = (_MEMPLAN / "demo", _MEMPLAN.parent)

_FORM = "Write MODULE:FACTORY, or MODULE:FACTORY(size=64, batch=2) with literal keyword arguments."


class FactoryError(MemplanError):
    """The reference is malformed, does not import, or does not give `(step, args)`."""

    guide = "errors#factory"


@dataclass(frozen=True)
class Reference:
    """The factory of a step: `module:name(**arguments)`."""

    module: str
    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in sorted(self.arguments.items()))
        return f"{self.module}:{self.name}" + f"({arguments})" * bool(arguments)

    def with_arguments(self, arguments: Mapping[str, Any]) -> Reference:
        """The same call with more arguments."""
        return Reference(self.module, self.name, {**self.arguments, **arguments})


def parse(text: str) -> Reference:
    """Read a reference. Arguments are Python literals; nothing is evaluated.

    Raises:
      FactoryError: the text is no reference; names the wrong part.
    """
    module, colon, call = text.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        raise FactoryError(f"{text!r} does not name a factory. {_FORM}")
    try:
        node = ast.parse(call.strip(), mode="eval").body
    except SyntaxError as error:
        raise FactoryError(f"{call!r} in {text!r} is not a call: {error.msg}. {_FORM}") from error
    keywords = []
    if isinstance(node, ast.Call):
        if node.args:
            raise FactoryError(f"{text!r} passes an argument without its name. {_FORM}")
        node, keywords = node.func, node.keywords
    if not isinstance(node, ast.Name):
        raise FactoryError(f"{call!r} in {text!r} is not the name of a factory. {_FORM}")
    return Reference(module, node.id, dict(_literal(keyword, text) for keyword in keywords))


def load(reference: Reference) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Import the module, with the current directory importable, call the factory and return `(step,
    args)`.

    Raises:
      FactoryError: no such module or factory, an error of its own, or another result than `(step,
        args)`.
    """
    factory = getattr(_module(reference), reference.name, None)
    if not callable(factory):
        raise FactoryError(_no_factory(reference, factory))
    try:
        result = factory(**reference.arguments)
    except (Exception, SystemExit) as error:
        raise FactoryError(
            f"The factory {reference} failed with {type(error).__name__}: {error}"
        ) from error
    return _step_and_args(result, reference)


def demo() -> Callable[..., int | None]:
    """The demo's `main`, wherever the command runs.

    Raises:
      FactoryError: a package that it needs is missing.
    """
    file = f"{DEMO.replace('.', '/')}.py"
    root = next(folder for folder in _DEMO_FOLDERS if (folder / file).is_file())
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(DEMO).main
    except ModuleNotFoundError as error:
        raise FactoryError(f"The demo needs {error.name}: pip install 'memplan[demo]'.") from error


def _module(reference: Reference) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(reference.module)
    except ModuleNotFoundError as error:
        if error.name and f"{reference.module}.".startswith(f"{error.name}."):
            raise FactoryError(
                f"The module {error.name!r} is neither installed nor in {folder}. Check the "
                "spelling, or run memplan in the folder of the module."
            ) from error
        raise FactoryError(
            f"The module {reference.module!r} imports {error.name!r}, which is not installed."
        ) from error
    except (Exception, SystemExit) as error:
        raise FactoryError(
            f"Importing {reference.module!r} failed with {type(error).__name__}: {error}"
        ) from error


def _literal(keyword: ast.keyword, text: str) -> tuple[str, Any]:
    if keyword.arg is None:
        raise FactoryError(f"{text!r} unpacks a mapping. {_FORM}")
    try:
        return keyword.arg, ast.literal_eval(keyword.value)
    except ValueError as error:
        raise FactoryError(
            f"{keyword.arg}={ast.unparse(keyword.value)} in {text!r} is not a literal. {_FORM}"
        ) from error


def _no_factory(reference: Reference, entry: object) -> str:
    if entry is not None:
        return f"{reference} is a {type(entry).__name__}, not a function that returns (step, args)."
    entries = vars(sys.modules[reference.module])
    public = [name for name, value in entries.items() if callable(value)]
    close = difflib.get_close_matches(reference.name, public, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"The module {reference.module!r} has no {reference.name!r}.{hint}"


def _step_and_args(
    result: Any,
    reference: Reference,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    advice = (
        "It must return (step, args): the function to plan and the tuple of its arguments, such as "
        "(state, batch)."
    )
    if not isinstance(result, tuple):
        raise FactoryError(f"{reference} returned a {type(result).__name__}. {advice}")
    if len(result) != 2:
        raise FactoryError(f"{reference} returned a tuple of length {len(result)}. {advice}")
    step, args = result
    if not callable(step) and not hasattr(step, "plan"):  # memplan.keras.plan's cannot be called
        raise FactoryError(f"{reference} returned a {type(step).__name__} as its step. {advice}")
    if not isinstance(args, (tuple, list)):
        raise FactoryError(f"{reference} returned a {type(args).__name__} as its args. {advice}")
    return step, tuple(args)
