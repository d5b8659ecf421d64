"""The launcher with small programs that do not import jax."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memplan.cli import app as cli
from memplan.errors import MemplanError
from memplan.parallel.launch import Launch, launch
from tests.parallel.processes import LAUNCH, ROOT

RANK = "import os, sys, time; rank = int(os.environ['MEMPLAN_PROCESS'])\n"
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


def alive(pid: int) -> bool:
    """False for a zombie, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_environment_of_a_process(run: Callable[..., Result]) -> None:
    names = ["MEMPLAN_PROCESSES", "MEMPLAN_DEVICES", "MEMPLAN_TIMEOUT", "JAX_PLATFORMS"]
    code, out, _ = run(f"print(*(os.environ[name] for name in {names}))", 2, devices=5, timeout_s=7)
    assert code == 0 and out == ["[0] 2 5 7 cpu", "[1] 2 5 7 cpu"]


def test_every_line_has_its_rank(run: Callable[..., Result]) -> None:
    code, out, err = run(
        "print('hello'); print('two', file=sys.stderr); sys.stdout.write('no end')"
    )
    assert code == 0
    assert out == [f"[{rank}] {line}" for rank in range(3) for line in ("hello", "no end")]
    assert sorted(err.splitlines()) == ["[0] two", "[1] two", "[2] two"]


def test_it_starts_again(run: Callable[..., Result], tmp_path: Path) -> None:
    program = f"if rank == 1 and not os.path.exists(mark := {str(tmp_path / 'mark')!r}): open(mark, 'w'), sys.exit(9)"
    code, _, err = run(program, 2, restarts=2)
    assert code == 0 and "starting again, restart 1 of 2" in err and "restart 2" not in err


def test_it_gives_up_after_its_restarts(run: Callable[..., Result]) -> None:
    code, _, err = run("sys.exit(6)", 1, restarts=2)
    assert code == 6 and err.count("ended with exit code 6") == 3


def test_a_killed_rank_is_named_and_gives_the_exit_code(run: Callable[..., Result]) -> None:
    start = time.monotonic()
    code, _, err = run("os.kill(os.getpid(), 9) if rank == 2 else time.sleep(60)", 3, grace_s=0.5)
    assert code == 137
    assert "memplan launch: rank 2 (pid " in err and "was killed by SIGKILL" in err
    assert time.monotonic() - start < 20


def test_a_rank_that_ignores_sigterm_is_killed(run: Callable[..., Result]) -> None:
    program = "import signal; signal.signal(15, signal.SIG_IGN)\nif rank: time.sleep(0.5), sys.exit(4)\ntime.sleep(60)"
    code, _, err = run(program, 2, grace_s=0.3)
    assert code == 4 and "rank 1 (pid " in err and "ended with exit code 4" in err


def test_a_rank_has_time_to_end_by_itself(run: Callable[..., Result]) -> None:
    code, out, _ = run(
        "sys.exit(2) if rank == 0 else (time.sleep(1), print('rank 0 failed'), sys.exit(1))", 2
    )
    assert code == 2 and out == ["[1] rank 0 failed"]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL],
)
def test_nothing_is_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    program = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid())); time.sleep(60)"
    launcher = subprocess.Popen(
        [*LAUNCH, "-n2", "--devices=1", "--", sys.executable, "-c", RANK + program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.DEVNULL,
    )
    while not all(
        (tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)
    ):
        time.sleep(0.02)
    launcher.send_signal(number)
    assert launcher.wait(20) == (-9 if number == signal.SIGKILL else 128 + number)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    end = time.monotonic() + 3
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def test_children_of_a_rank_go_with_it(run: Callable[..., Result]) -> None:
    code, out, _ = run("import subprocess; print(subprocess.Popen(['sleep', '60']).pid)", 1)
    time.sleep(0.1)
    assert code == 0 and not alive(int(out[0].removeprefix("[0] ")))


def test_a_program_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(MemplanError, match="no program 'no-such-program-anywhere'"):
        launch(Launch(("no-such-program-anywhere",), 2, devices=1))


def test_a_port_in_use_is_an_error_before_a_process_starts() -> None:
    in_use = pytest.raises(OSError, match="Address already in use")
    with socket.create_server(("", 0)) as server, in_use:
        launch(Launch(("python",), 2, devices=1, port=server.getsockname()[1]))


def test_gpus_are_divided(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(MemplanError, match="4 GPUs cannot be divided among 3 processes"):
        launch(Launch(("python",), 3))
    code, out, _ = run("print(os.environ['MEMPLAN_LOCAL_DEVICE_IDS'])", 2, devices=None)
    assert code == 0 and out == ["[0] 0,1", "[1] 2,3"]


def test_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Launch] = []
    monkeypatch.setattr(cli.machines, "launch_processes", lambda run: runs.append(run) or 7)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    words = (
        "launch -n 4 --devices 2 --port 1234 --timeout 5 --restarts 3 --grace 1 -- python t.py -n 9"
    )
    assert CliRunner().invoke(cli.app, words.split()).exit_code == 7
    assert (
        CliRunner()
        .invoke(cli.app, ["launch", "-n", "2", "python", "t.py", "--port", "1"])
        .exit_code
        == 7
    )
    assert runs == [
        Launch(("python", "t.py", "-n", "9"), 4, 2, 1234, 5, 3, 1.0),
        Launch(("python", "t.py", "--port", "1"), 2),
    ]
