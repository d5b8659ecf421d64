"""An empty folder with a module of factories, and a planner that answers at once."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplan import api
from tests.cli.command import Planner


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    stand_in = Planner()
    monkeypatch.setattr(api, "jit", stand_in.jit)
    return stand_in


@pytest.fixture(autouse=True)
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory with a module `workshop`; forgotten afterwards."""
    (tmp_path / "workshop.py").write_text(
        textwrap.dedent(
            """
            def step(state, batch):
                return state

            def make(size=1, **rest):
                print("hello from the factory")
                return step, ({"w": size, **rest}, 2)

            def alone(): return lambda x: x, (1,)
            def none(): return None
            def three(): return step, (1, 2), 3
            def no_step(): return 5, (1,)
            def no_args(): return step, {"state": 1}
            def angry(): raise RuntimeError("no data here")

            made = 5
            """
        )
    )
    (tmp_path / "broken.py").write_text("import no_such_thing_at_all")
    (tmp_path / "raising.py").write_text("raise ValueError('at import')")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("workshop", "experiments") or name.startswith("experiments."):
            del sys.modules[name]
