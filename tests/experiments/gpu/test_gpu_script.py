"""Rows are stored one by one, resume after an interruption, and need no optional package."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import memplan
from experiments.gpu import __main__ as script
from experiments.gpu import measure
from experiments.gpu.card import STAND_IN
from experiments.gpu.operations import GROUPS
from experiments.gpu.rows import MODELS, ROWS, TOY_ROWS, Row
from tests.gpu_runtime import stand_in
from tests.gpu_runtime.toys import mlp

LACKING = (
    "nibabel", "orbax", "matplotlib", "perfetto", "grain", "PIL", "ortools", "pytest", "hypothesis",
    "equinox",
    "playwright", "viztracer", "jax_plugins", "jax_cuda12_plugin", "nvidia",
)  # fmt: skip
CARD = {
    "name": "NVIDIA H100",
    "how": "NVIDIA H100, driver 580.1",
    "platform": "gpu",
    "real": True,
    "versions": {},
}

Answer = Callable[[Row], dict[str, Any]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run the script with rows that answer at once; returns its exit code and the rows' names."""

    def run(answer: Answer, *options: str, card: dict[str, Any] = CARD) -> tuple[int, list[str]]:
        requested: list[str] = []

        def in_a_process(row: Row, folder: Path, limit_s: float) -> dict[str, Any]:
            if row.measure == "card":
                return {"card": card}
            requested.append(row.name)
            return {"pairs": {}, "facts": {}, **answer(row)}

        monkeypatch.setattr(script, "_in_a_process", in_a_process)
        monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), *options])
        return script.main(), requested

    return run


def test_a_failure_is_kept_and_stops_nothing(start: Any, tmp_path: Path) -> None:
    code, requested = start(
        lambda row: {"error": "ended with code 1: words"} if row is ROWS[1] else {}
    )
    assert code == 1
    assert requested == [row.name for row in ROWS]
    kept = json.loads((tmp_path / "nvidia-h100.json").read_text())
    assert [row["name"] for row in kept if "error" in row] == [ROWS[1].name]
    assert f"### Failed: {ROWS[1].name}" in (tmp_path / "FINDINGS.md").read_text()
    assert start(lambda row: {})[1] == []
    assert start(lambda row: {}, "--again") == (0, [ROWS[1].name])


def test_a_second_call_goes_on_where_the_time_was_over(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def over(row: Row) -> dict[str, Any]:
        return {"error": "ran longer than 9 s: ", "late": True} if row is ROWS[2] else {}

    _, requested = start(over, "--minutes", "1")  # less time is left than that row may take
    assert requested == [row.name for row in ROWS[:3]]
    printed = capsys.readouterr().out.splitlines()[-1]
    assert all(repr(row.name) in printed for row in ROWS[2:])
    page = (tmp_path / "FINDINGS.md").read_text()
    assert f"### Failed: {ROWS[2].name}" in page  # its figures are kept
    assert f"Not measured: {'; '.join(row.name for row in ROWS[3:])}." in page
    assert start(lambda row: {})[1] == [row.name for row in ROWS[2:]]


def test_a_row_that_may_not_take_longer_is_not_what_ends_the_time(start: Any) -> None:
    def late(row: Row) -> dict[str, Any]:
        return {"error": "ran longer than 150 s: ", "late": True} if row is ROWS[1] else {}

    assert start(late, "--minutes", "25") == (1, [row.name for row in ROWS])
    assert start(lambda row: {})[1] == []


def test_every_row_is_kept_before_the_next_begins(start: Any, tmp_path: Path) -> None:
    def answer(row: Row) -> dict[str, Any]:
        path = tmp_path / "nvidia-h100.json"
        measured = (
            [kept_row["name"] for kept_row in json.loads(path.read_text())] if path.exists() else []
        )
        assert measured == [kept_row.name for kept_row in ROWS[: ROWS.index(row)]]
        return {}

    start(answer)


def test_rows_side_by_side_are_all_kept(start: Any, tmp_path: Path) -> None:
    """Three rows run at a time: each waits for two others."""
    barrier = threading.Barrier(3, timeout=30)

    def answer(row: Row) -> dict[str, Any]:
        barrier.wait()
        return {}

    rows = [row.name for row in TOY_ROWS][:9]
    code, requested = start(answer, "--toy", "--side-by-side", "3", "--rows", *rows)
    kept = json.loads((tmp_path / "nvidia-h100.json").read_text())
    assert code == 0 and sorted(requested) == sorted(rows) == sorted(row["name"] for row in kept)


def test_what_is_timed_has_the_card_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.tempfile, "gettempdir", lambda: str(tmp_path))
    inside: list[int] = []

    def timed(number: int) -> None:
        with measure.card_alone():
            inside.append(number)
            time.sleep(0.02)
            assert inside.pop() == number and not inside

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(timed, range(8)))


def test_what_is_no_real_card_is_refused(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {**CARD, "name": "Stand-in", "how": STAND_IN, "real": False}
    assert start(lambda row: {}, card=card) == (2, [])
    assert "not a real card" in capsys.readouterr().err
    assert start(lambda row: {}, "--toy", card={**card, "platform": "cpu"}) == (2, [])
    assert start(lambda row: {}, "--toy", card=card) == (0, [row.name for row in TOY_ROWS])
    assert start(lambda row: {}, "--report") == (2, [])
    assert "rows are not a real card's" in capsys.readouterr().err


def test_names_are_unique_and_models_known() -> None:
    for rows in (ROWS, TOY_ROWS):
        assert len({row.name for row in rows}) == len(rows)
        assert all(row.model in MODELS for row in rows if row.model)
        prefixes = [prefix for row in rows for prefix in row.groups]
        assert all(any(name.startswith(prefix) for name in GROUPS) for prefix in prefixes)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_operations_can_be_traced(name: str) -> None:
    functions = []

    def make() -> Any:
        function, args = GROUPS[name]()
        functions.append(function)
        return args

    args = jax.eval_shape(make)
    assert jax.tree.leaves(jax.eval_shape(functions[0], *args))


# A process that prints figures, starts another process and hangs; `place` has the ids of both.
_HANGS = """
import os, pathlib, signal, subprocess, sys, time
place = pathlib.Path({!r})
if "experiments.gpu.measure" in sys.orig_argv and "HANGS" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('{{"pairs": {{"step_s": [1, 2]}}}}\\n{{"pairs": ', end="", flush=True)
    other = subprocess.Popen(["sleep", "1000"])
    place.with_suffix(".part").write_text(f"{{os.getpid()}} {{other.pid}}")
    place.with_suffix(".part").rename(place)
    time.sleep(1000)
"""


@pytest.fixture
def hanging(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Environment of a row that hangs, and the file that gets the ids of its processes."""
    place = tmp_path / "ids"
    (tmp_path / "sitecustomize.py").write_text(_HANGS.format(str(place)))
    return {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "HANGS": "1"}, place


def test_a_row_that_hangs_is_killed_and_the_next_one_starts(
    hanging: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows run without packages that a machine with a card lacks; an unknown measure fails."""
    environment, place = hanging
    bare = _bare(tmp_path / "bare")
    rows = [
        Row("hangs", "card", environment=environment, limit_s=2),
        Row("next", "no measure", environment=bare),
    ]
    monkeypatch.setattr(script, "TOY_ROWS", rows)
    monkeypatch.setattr(script, "_GRACE_S", 0.2)
    monkeypatch.setattr(script, "_START", Row("card", "card", environment=bare))
    words = ["--toy", "--allow-cpu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    assert script.main() == 1
    (path,) = (tmp_path / "out").glob("*.json")
    first, second = json.loads(path.read_text())
    assert first["error"].startswith("ran longer than 2 s")
    assert first["pairs"] == {"step_s": [1, 2]}
    assert second["error"].startswith("ended with code 1")
    assert second["error"].strip().endswith("KeyError: 'no measure'")
    assert not any(map(_runs, place.read_text().split()))


def test_who_ends_the_script_ends_the_row(hanging: Any, tmp_path: Path) -> None:
    environment, place = hanging
    command = [
        sys.executable,
        "-m",
        "experiments.gpu",
        "--toy",
        "--allow-cpu",
        "--out",
        str(tmp_path / "out"),
    ]
    script_ = subprocess.Popen(command, env={**os.environ, **environment}, cwd=script._ROOT)
    while not place.exists():
        assert script_.poll() is None
        time.sleep(0.05)
    script_.terminate()
    assert script_.wait(30) == 128 + signal.SIGTERM
    assert not any(map(_runs, place.read_text().split()))


def _runs(pid: str) -> bool:
    """Whether the process exists and is no zombie."""
    path = Path("/proc", pid, "stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_where_a_budget_does_not_fit_the_smallest_is_taken_if_that_was_asked() -> None:
    step, (params, batch) = mlp(2, 32, 256)
    start = measure.Start(step, params, batch)
    row = Row("a", "planned", budget="1KiB")
    with pytest.raises(memplan.InfeasibleBudgetError) as refused:
        start.planned(row)
    report = start.planned(replace(row, smallest=True)).report
    assert report.budget_bytes == refused.value.smallest_bytes >= report.compiled_peak_bytes


@pytest.mark.slow
def test_a_row_is_measured_without_them(tmp_path: Path) -> None:
    row = Row("a", "planned", "toy-unet3d", 0.75, seeds=2, environment=_bare(tmp_path))
    record = script._in_a_process(row, tmp_path, 600)
    facts = record["facts"]
    assert facts["leaves"] > 0
    for name in ("planned", "plain once more", "planned once more"):
        assert facts[f"{name}: leaves equal to the bit, by step"] == [facts["leaves"]] * 2
    assert facts["kernels that XLA chose otherwise than in the plain step"].startswith("0 of ")
    assert record["pairs"]["compiled_bytes"][0] <= facts["budget_bytes"]
    assert not record["card"]["real"]


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.skipif(stand_in.missing() is not None, reason=str(stand_in.missing()))
def test_toy_rows_run_on_a_stand_in_driver(tmp_path: Path) -> None:
    """One row of each kind but `rates` (two minutes of compilation) and `restart`."""
    rows = ["3D U-Net, slabs", "3D U-Net, jax.checkpoint", "3D U-Net, a pinned"]
    command = [
        sys.executable,
        "-m",
        "experiments.gpu",
        "--toy",
        "--out",
        str(tmp_path),
        "--rows",
        *rows,
    ]
    environment = {**os.environ, **stand_in.environment_of(), "STAND_IN_CARD": "h100"}
    subprocess.run(command, env=environment, cwd=script._ROOT, check=True, timeout=1500)
    (path,) = tmp_path.glob("*.json")
    records = json.loads(path.read_text())
    assert {row["card"]["how"] for row in records} == {STAND_IN}
    slabs, checkpoint, gate, attempt = ({**row["facts"], **row["pairs"]} for row in records)
    assert slabs["loops over slabs"] > 0 and slabs["host_bytes"] > 0
    assert float(slabs["planned: largest difference"].partition(",")[0]) < 1e-4
    assert sum("its time over memplan's" in name for name in checkpoint) == 2
    assert gate["way"] == "slabs" and gate["gate"].partition(": output ")[0].endswith(" tolerance")
    assert attempt["refused"] == "no: it ran"
    assert "Not measured" not in (tmp_path / "FINDINGS.md").read_text()


_BLOCKED = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {!r}):
            raise ModuleNotFoundError(name + " is not here", name=name)
sys.meta_path.insert(0, Finder())
"""


def _bare(folder: Path) -> dict[str, str]:
    """Environment of a CPU process that cannot import these packages."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_BLOCKED.format(LACKING))
    return {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
