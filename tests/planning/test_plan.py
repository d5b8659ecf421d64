"""Plans survive the disk whole, or not at all; a damaged or foreign file is refused with help."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan import io
from memplan.errors import MemplanError, PlanMismatchError
from memplan.planning.loops import Residuals
from memplan.planning.plan import FORMAT, Plan, name_actions
from memplan.planning.problem import Buffer, Kernel, Problem, Role
from memplan.planning.schedule import Action, Kind
from memplan.planning.slabs.slabs import Slabs
from memplan.planning.transforms import IndexedStacks, LoopResiduals, StateOnHost

ACTIONS = st.tuples(st.sampled_from(list(Kind)), st.text())
NUMBERS = st.lists(st.integers(0, 10**6), max_size=3).map(tuple)
SMALL = st.integers(0, 9)
FLAGS = st.lists(st.booleans(), max_size=3).map(tuple)
LOOPS = st.lists(
    st.none() | st.builds(Residuals, NUMBERS, NUMBERS, SMALL, SMALL, FLAGS), max_size=3
).map(tuple)
ROOMS = st.none() | st.integers(0, 1 << 40)
NUMBER, SET = st.integers(0, 10**6), st.frozensets(st.integers(0, 10**6), max_size=3)
PAIRS = st.frozensets(st.tuples(NUMBER, NUMBER), max_size=4)
TRANSFORMS = st.lists(
    st.just(IndexedStacks())
    | st.builds(LoopResiduals, LOOPS)
    | st.builds(Slabs, NUMBER, NUMBER, NUMBER, SET, SET, SET, PAIRS)
    | st.builds(StateOnHost, NUMBERS, st.booleans()),
    max_size=4,
).map(tuple)
NAMES = st.lists(st.text(), max_size=2).map(tuple)
KERNELS = st.lists(st.tuples(st.text(), st.text()), max_size=2).map(tuple)
PLANS = st.builds(
    Plan,
    st.lists(ACTIONS, max_size=8).map(tuple),
    *[st.text()] * 3,
    *(TRANSFORMS, ROOMS, NAMES),
    *(st.text(), st.text(), KERNELS, st.none() | st.booleans()),
    st.none() | st.tuples(NUMBER, st.sampled_from(["", "critical first", "in turn"])),
    ROOMS,
)
RESIDUALS = io.encode(Residuals((1,)))
SLABS = io.encode(Slabs(1, 0, 8, *[frozenset({2})] * 3))
SMALL = Plan(((Kind.RUN, "fusion.3"), (Kind.OFFLOAD, "fusion.3{1}")), "f00d", "kernels", "v100")


@given(PLANS)
def test_what_is_loaded_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan
) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    SMALL.save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanMismatchError, match="complete memplan plan"):
            Plan.load(path)


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.json"
    SMALL.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"3",
        b'"plan"',
        b"{}",
        b"[" * 200_000,
        b'{"format": 1}',
        b"\x00" * 100,
    ],
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
        {"length": 3},
        {"actions": None},
        {"actions": [["run"]] * 2},
        {"actions": [["explode", "a"]] * 2},
        {"actions": [["run", "a", 2]] * 2},
        {"actions": "abc"},
        {"format": 3},
        {"transforms": None},
        {"transforms": [3]},
        {"transforms": [{}]},
        {"transforms": [{"tag": "tiles"}]},
        {"transforms": [{"tag": ["slabs"]}]},
        {"transforms": [{"tag": "residuals"}]},
        {"transforms": [{"tag": "residuals", "residuals": [{**RESIDUALS, "kept": [1.5]}]}]},
        {"transforms": [{"tag": "residuals", "residuals": [{"kept": [1], "on_host": []}]}]},
        {"transforms": [{"tag": "state on the host", "inputs": ["1"], "streams": True}]},
        {"transforms": [{"tag": "state on the host", "inputs": None, "streams": True}]},
        {"transforms": [{"tag": "state on the host", "inputs": [1]}]},
        {"transforms": [{**SLABS, "tag": "residuals"}]},
        {"transforms": [{**SLABS, "on_host": ["1"]}]},
        {"transforms": [{**SLABS, "rows": 1.5}]},
        {"transforms": [{**SLABS, "dim": None}]},
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
    SMALL.check("f00d")
    with pytest.raises(
        PlanMismatchError, match=r"made for program f00d, but this step is another"
    ) as caught:
        SMALL.check("another")
    assert isinstance(caught.value, MemplanError)


def test_names_stand_for_numbers() -> None:
    buffers = tuple(
        Buffer(name, 8, Role.TEMPORARY, number, number) for number, name in enumerate(("a", "b{1}"))
    )
    problem = Problem(buffers, (Kernel("a", (), (0,)), Kernel("b", (0,), (1,))), (1,), frozenset())
    kinds = (Kind.RUN, Kind.OFFLOAD, Kind.OFFLOADED, Kind.PREFETCH, Kind.PREFETCHED, Kind.RUN)
    schedule = tuple(
        Action(kind, number) for kind, number in zip(kinds, (0, 0, 0, 0, 0, 1), strict=True)
    )
    plan = replace(SMALL, actions=name_actions(problem, schedule))
    assert name_actions(problem, [Action(Kind.OFFLOAD, 1)]) == ((Kind.OFFLOAD, "b{1}"),)
    assert plan.schedule(problem) == schedule
    with pytest.raises(PlanMismatchError, match=r"fusion\.3.*Plan again"):
        SMALL.schedule(problem)


@pytest.mark.parametrize(
    ("where", "function"),
    [(Path, "replace"), (Path, "write_bytes"), (json, "dumps")],
)
@pytest.mark.parametrize(
    "error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, function: str, error: BaseException
) -> None:
    path = tmp_path / "plan.json"
    SMALL.save(path)

    def fail(*arguments: Any, **keywords: Any) -> None:
        if function == "write_bytes":
            arguments[0].write_text('{"format":')  # half of it is out when it fails
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(where, function, fail)
        with pytest.raises(type(error)):
            replace(SMALL, planner="other").save(path)
    assert Plan.load(path) == SMALL
    assert os.listdir(tmp_path) == ["plan.json"], "the temporary file is gone"
