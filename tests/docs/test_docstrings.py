"""Every public name has an example that runs: in its docstring, or in the guide that the reference names."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import memplan
from memplan import api, equinox, keras, nnx, parallel, stages

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "api.md").read_text()
ROOMS = memplan, api, equinox, keras, nnx, parallel, stages
# By name. Errors have guides, which tests/test_errors.py finds.
PUBLIC = {
    f"{room.__name__}.{name}": getattr(room, name)
    for room in ROOMS
    for name in room.__all__
    if not (room is api and name in memplan.__all__)
    and not isinstance(getattr(room, name), ModuleType)
    and not hasattr(getattr(room, name), "guide")
}


def run_example(name: str) -> list[Any]:
    """Run the example in a docstring, and return the variables that it leaves."""
    if name == "memplan.parallel.initialize":  # which must come first in its process
        code = "import doctest, memplan; doctest.run_docstring_examples(memplan.parallel.initialize, {})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, ""), done
        return []
    example = doctest.DocTestParser().get_doctest(PUBLIC[name].__doc__, {}, name, None, None)
    report: list[str] = []
    doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
    assert not report, "".join(report)
    return list(example.globs.values())


def guides_of(name: str) -> list[str]:
    """The guides that the reference names behind the entry, and that run code with this name."""
    _, _, behind = REFERENCE.partition(f":: {name}")
    entry = behind.partition("\n## ")[0]
    word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    cells = re.compile(r"```\{code-cell\} python\n(.*?)```", re.DOTALL)
    guides = re.findall(r"\.\./(guides/\w+\.md)", entry)
    return [
        guide
        for guide in guides
        if any(word.search(cell) for cell in cells.findall((ROOT / "docs" / guide).read_text()))
    ]


def test_every_public_name_has_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = [name for name, entry in PUBLIC.items() if ">>>" in (entry.__doc__ or "")]
    variables = [variable for name in examples for variable in run_example(name)]
    shown = {type(variable) for variable in variables}
    missing = [
        name
        for name, entry in PUBLIC.items()
        if name not in examples and entry not in shown and not guides_of(name)
    ]
    assert missing == []
