"""Plans survive the disk whole, or not at all; a damaged or foreign file is refused with help."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import MemplanError, PlanMismatchError
from memplan.planning.plan import FENCE, FORMAT, Action, Kind, Plan, segments
from memplan.planning.unfold import keep_everything
from tests.planning.graphs import chain, layout_of

ACTIONS = st.builds(Action, st.sampled_from(sorted(Kind)), st.integers(-1, 10**6))
PLANS = st.builds(Plan, st.lists(ACTIONS, max_size=8).map(tuple), st.text(), st.text(), st.text())
SMALL = Plan((Action(Kind.COMPUTE, 3), FENCE, Action(Kind.OFFLOAD, 12)), "f00d", "greedy", "v100")


@given(PLANS)
def test_what_is_loaded_is_what_was_saved(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan
    assert all(isinstance(action.kind, Kind) for action in Plan.load(path).actions)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    SMALL.save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanMismatchError, match="whole memplan plan"):
            Plan.load(path)


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.json"
    SMALL.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"null", b"[]", b"3", b'"plan"', b"{}", b"[" * 200_000, b'{"format": 1}', b"\x00" * 100],
    ids=lambda content: repr(content[:12]),
)
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanMismatchError, match=r"plan\.json"):
        Plan.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": FORMAT + 1},
        {"format": None},
        {"length": 2},
        {"actions": None},
        {"actions": [["compute"]] * 3},
        {"actions": [["explode", 1]] * 3},
        {"actions": [["compute", "1"]] * 3},
        {"actions": [["compute", 1.5]] * 3},
        {"actions": [["compute", float("inf")]] * 3},
        {"actions": [["compute", None]] * 3},
        {"actions": [["compute", 1, 2]] * 3},
        {"actions": "abc"},
    ],
    ids=str,
)
def test_wrong_contents_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(PlanMismatchError, match="save the plan again"):
        Plan.load(saved(tmp_path, **changes))


def test_no_file_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nowhere.json")


def test_another_program_is_refused() -> None:
    graph = chain(2)
    plan = keep_everything(layout_of(graph), "v100")
    plan.check(graph)
    with pytest.raises(PlanMismatchError, match=r"made for program a program, this step is another") as caught:
        plan.check(replace(graph, fingerprint="another"))
    assert isinstance(caught.value, MemplanError)


@pytest.mark.parametrize(("where", "what"), [(Path, "replace"), (Path, "write_bytes"), (json, "dumps")])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, what: str, error: BaseException
) -> None:
    path = tmp_path / "plan.json"
    SMALL.save(path)

    def fail(*given: Any, **named: Any) -> None:
        if what == "write_bytes":
            given[0].write_text('{"format":')  # half of it is out when it fails
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(where, what, fail)
        with pytest.raises(type(error)):
            replace(SMALL, planner="other").save(path)
    assert Plan.load(path) == SMALL
    assert os.listdir(tmp_path) == ["plan.json"], "the temporary file is gone"


def test_segments_are_what_fences_divide() -> None:
    a, b = Action(Kind.COMPUTE, 0), Action(Kind.FREE, 1)
    assert list(segments([])) == []
    assert list(segments([a, b])) == [(a, b)]
    assert list(segments([a, FENCE, b])) == [(a,), (b,)]
    assert list(segments([FENCE, FENCE, b])) == [(), (), (b,)]
    assert list(Plan((a, FENCE), "", "").segments()) == [(a,)]
