"""Who may import whom: import-linter holds the contracts of pyproject.toml, and this what it cannot see."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "memplan").rglob("*.py")) + sorted((ROOT / "models").rglob("*.py"))
DOOR = "memplan/program/compat/"  # to what jax keeps to itself
INTERNALS = ("jax._src", "jax.extend")
EXTRAS = ("matplotlib", "perfetto")  # imported where they are used
# Back ends of XLA's by jax's names, and who may name them: all others ask `Backend` or `Platform`.
BACK_ENDS = ("cuda", "tpu")
NAMES_THEM = (
    *("memplan/hardware/", "memplan/xla/gpu/", "memplan/xla/tpu/"),
    *("memplan/xla/target.py", "memplan/xla/local.py"),
)
# public names when asked for; the user's MODULE:FACTORY
BY_NAME = ("memplan/__init__.py", "memplan/cli/factory.py")


def breaches(tree: ast.AST, path: str) -> Iterator[str]:
    """What one module does that it may not, with its line."""
    for node, inside in walk(tree):
        for name in names(node):
            if not path.startswith(DOOR) and name.startswith(INTERNALS):
                yield f"{path}:{node.lineno} reaches into {name}"
            if (
                inside
                and isinstance(node, ast.Import | ast.ImportFrom)
                and not name.startswith(EXTRAS)
            ):
                yield f"{path}:{node.lineno} imports {name} inside a function"
            if path not in BY_NAME and name.rpartition(".")[2] in ("import_module", "__import__"):
                yield f"{path}:{node.lineno} imports by name"
        if path.startswith(NAMES_THEM) or not isinstance(node, ast.Constant):
            continue
        if node.value in BACK_ENDS:
            yield f"{path}:{node.lineno} names the back end {node.value}"


def walk(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it stands in a function."""
    for child in ast.iter_child_nodes(node):
        yield child, inside
        yield from walk(
            child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )


def names(node: ast.AST) -> list[str]:
    """What an import or an expression names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute | ast.Name) else []


def test_the_contracts_of_pyproject_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    assert lint_imports(no_cache=True) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in SOURCES])
def test_what_the_contracts_cannot_see(path: str) -> None:
    assert not list(breaches(ast.parse((ROOT / path).read_text()), path))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import jax.extend.core as jex", "reaches into jax.extend.core"),
        ("from jax import extend", "reaches into jax.extend"),
        ("import jax\nx = jax._src.core.Var", "m.py:2 reaches into jax._src.core.Var"),
        ("def f():\n    import numpy", "m.py:2 imports numpy inside a function"),
        ("import importlib\nimportlib.import_module('jax')", "m.py:2 imports by name"),
        ("is_tpu = backend.platform == 'tpu'", "m.py:1 names the back end tpu"),
    ],
)
def test_the_laws_bite(source: str, said: str) -> None:
    assert any(said in breach for breach in breaches(ast.parse(source), "m.py"))
    assert not list(
        breaches(ast.parse("import numpy\ndef f():\n    import matplotlib.pyplot"), "m.py")
    )


def test_rooms_say_what_they_are_for_and_may_import() -> None:
    rooms = [
        path.parent
        for path in SOURCES
        if path.name == "__init__.py" and path.parent.name not in ("memplan", "models")
    ]
    for room in rooms:
        said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        assert "May import" in said and len(said.splitlines()) <= 4, room
    loose = {path.name for path in (ROOT / "memplan").glob("*.py")} - {"__init__.py"}
    assert len(loose) <= 12, loose


def test_every_judge_has_a_caller() -> None:
    """Each public function of `verify` is called, and each file that the docs trust is called by who plans or runs."""
    judges = sorted((ROOT / "memplan" / "verify").glob("*.py"))
    texts = {path: path.read_text() for path in SOURCES if path.name != "__init__.py"}
    called = set[str]()
    for judge in (path for path in judges if path.name != "__init__.py"):
        defined = [
            node for node in ast.parse(texts[judge]).body if isinstance(node, ast.FunctionDef)
        ]
        for name in (node.name for node in defined if not node.name.startswith("_")):
            callers = [
                path
                for path, text in texts.items()
                if path != judge and re.search(rf"\b{name}\(", text)
            ]
            inside = len(re.findall(rf"\b{name}\(", texts[judge])) > 1
            assert callers or inside, f"{judge.name}: nobody calls {name}"
            called.update(judge.stem for path in callers if path not in judges)
    trust = (
        (ROOT / "docs" / "architecture.md")
        .read_text()
        .partition("## Trust")[2]
        .partition("\n## ")[0]
    )
    trusted = set(re.findall(r"`verify\.(\w+)`", trust))
    assert trusted and trusted <= called


def test_lines_have_at_most_a_hundred_columns() -> None:
    files = (path for room in ("memplan", "models") for path in (ROOT / room).rglob("*.py"))
    long = [
        f"{path}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []
