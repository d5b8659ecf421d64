"""The launcher with small programs that know nothing of jax: what it passes on, names, restarts and leaves behind."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memplan.cli import app as cli
from memplan.errors import MemplanError
from memplan.parallel.runtime.launch import Launch, launch

ROOT = Path(__file__).parents[3]
LAUNCHER = (
    "import sys; from memplan.parallel.runtime.launch import *; sys.exit(launch(Launch((sys.executable, '-c', {}), 2)))"
)
RANK = "import os, sys, time; rank = int(os.environ['MEMPLAN_PROCESS']); attempt = int(os.environ['MEMPLAN_ATTEMPT'])\n"


Result = tuple[int, list[str], str]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Result]:
    """Exit code, sorted lines of standard output, standard error."""

    def launched(program: str, processes: int = 3, **options: Any) -> Result:
        command = (sys.executable, "-c", RANK + program)
        code = launch(Launch(command, processes, **{"devices": 1, **options}))
        out, err = capfdbinary.readouterr()
        return code, sorted(out.decode().splitlines()), err.decode()

    return launched


def test_what_a_process_is_told(run: Callable[..., Result]) -> None:
    names = ["MEMPLAN_PROCESSES", "MEMPLAN_DEVICES", "MEMPLAN_TIMEOUT", "JAX_PLATFORMS"]
    code, out, _ = run(f"print(*(os.environ[name] for name in {names}))", 2, devices=5, timeout_s=7)
    assert code == 0 and out == ["[0] 2 5 7 cpu", "[1] 2 5 7 cpu"]


@pytest.mark.parametrize(("fewest", "again"), [(None, 4), (2, 3), (4, 4)])
def test_it_starts_again(run: Callable[..., Result], fewest: int | None, again: int) -> None:
    program = "print(attempt, os.environ['MEMPLAN_PROCESSES'])\nif attempt == 0: sys.exit(9 if rank == 1 else 75)"
    code, out, err = run(program, 4, restarts=1, min_processes=fewest)
    assert code == 0
    assert f"starting again with {again} processes, restart 1 of 1" in err
    assert f"[0] 1 {again}" in out


def test_it_gives_up_after_its_restarts(run: Callable[..., Result]) -> None:
    code, _, err = run("sys.exit(6)", 1, restarts=2)
    assert code == 6 and err.count("ended with exit code 6") == 3


def test_a_port_in_use_is_told_before_anything_starts(run: Callable[..., Result]) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MemplanError, match=f"Port {port} cannot be used: Address already in use"):
            launch(Launch(("python", "x"), 2, devices=1, port=port))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Launch((), 2, devices=1), "nothing to start"),
        (Launch(("no-such-program-anywhere",), 2, devices=1), "no program 'no-such-program-anywhere'"),
        (Launch(("python",), 2, devices=1, min_processes=3), "not between 1 and 2"),
    ],
)
def test_what_cannot_be_started_is_told(wanted: Launch, told: str) -> None:
    with pytest.raises(MemplanError, match=told):
        launch(wanted)


def test_gpus_are_divided(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(MemplanError, match="4 GPUs cannot be divided among 3 processes"):
        launch(Launch(("python",), 3))
    code, out, _ = run("print(os.environ['MEMPLAN_LOCAL_DEVICE_IDS'])", 2, devices=None)
    assert code == 0 and out == ["[0] 0,1", "[1] 2,3"]


def test_the_command_passes_on_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Launch] = []
    monkeypatch.setattr(cli.distributed, "launch_processes", lambda wanted: asked.append(wanted) or 7)
    words = (
        "launch -n 4 --devices 2 --port 1234 --timeout 5 --restarts 3 --min-processes 2 --grace 1 -- python t.py -n 9"
    )
    assert CliRunner().invoke(cli.app, words.split()).exit_code == 7
    assert CliRunner().invoke(cli.app, ["launch", "-n", "2", "python", "t.py", "--port", "1"]).exit_code == 7
    assert asked == [
        Launch(("python", "t.py", "-n", "9"), 4, 2, 1234, 5.0, 3, 2, 1.0),
        Launch(("python", "t.py", "--port", "1"), 2),
    ]


def test_the_command_tells_of_a_port_in_use_with_exit_code_2() -> None:
    with socket.create_server(("", 0)) as other:
        words = ["launch", "-n", "2", "--devices", "1", "--port", str(other.getsockname()[1]), "--", sys.executable]
        done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2 and "Address already in use" in done.stderr
