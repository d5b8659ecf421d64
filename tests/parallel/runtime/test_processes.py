"""Processes of small programs that leave jax alone: their lines, how they end, who is named, what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.parallel.runtime import processes
from memplan.parallel.runtime.monitor import EXIT_CODE
from memplan.parallel.runtime.processes import Exit

ROOT = Path(__file__).parents[3]
RANK = "import os, sys, time; rank = int(os.environ['RANK'])\n"
LAUNCHER = """
import os, sys
from memplan.parallel.runtime.processes import run
run((sys.executable, "-c", {program!r}), [{{**os.environ, "RANK": str(rank)}} for rank in range(2)], 5.0)
"""

Ended = tuple[list[Exit], list[str], str]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Ended]:
    """Those that failed, sorted lines of standard output, standard error."""

    def started(program: str, count: int = 3, grace_s: float = 5.0) -> Ended:
        environments = [{**os.environ, "RANK": str(rank)} for rank in range(count)]
        failed = processes.run((sys.executable, "-c", RANK + program), environments, grace_s)
        out, err = capfdbinary.readouterr()
        return failed, sorted(out.decode().splitlines()), err.decode()

    return started


def alive(pid: int) -> bool:
    """A zombie, whom nobody has asked yet, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_exit_has_the_code_of_a_shell() -> None:
    assert (Exit(1, 7, 3).code, str(Exit(1, 7, 3))) == (3, "rank 1 (pid 7) ended with exit code 3")
    assert (Exit(0, 7, -9).code, str(Exit(0, 7, -9))) == (137, "rank 0 (pid 7) was killed by SIGKILL")


def test_the_exit_code_of_a_follower_is_the_monitors() -> None:
    assert processes.FOLLOWED == EXIT_CODE


def test_every_line_has_its_rank(run: Callable[..., Ended]) -> None:
    failed, out, err = run("print('hello'); print('two', file=sys.stderr); sys.stdout.write('no end')")
    assert failed == []
    assert out == [f"[{rank}] {line}" for rank in range(3) for line in ("hello", "no end")]
    assert sorted(err.splitlines()) == ["[0] two", "[1] two", "[2] two"]


def test_a_killed_rank_is_named_and_gives_the_exit_code(run: Callable[..., Ended]) -> None:
    begun = time.monotonic()
    failed, _, err = run("os.kill(os.getpid(), 9) if rank == 2 else time.sleep(60)", 3, grace_s=0.5)
    assert (failed[0].rank, failed[0].code) == (2, 137)
    assert "memplan launch: rank 2 (pid " in err and "was killed by SIGKILL" in err
    assert "rank 0 (pid " in err and "still runs: SIGTERM" in err
    assert time.monotonic() - begun < 8


def test_who_only_followed_is_not_the_first(run: Callable[..., Ended]) -> None:
    failed, _, err = run("sys.exit(3) if rank == 1 else sys.exit(75)")
    assert failed[0].code == 3
    assert err.index("rank 1") < err.index("afterwards rank")


def test_what_ignores_sigterm_is_killed(run: Callable[..., Ended]) -> None:
    program = "import signal; signal.signal(15, signal.SIG_IGN)\nif rank: time.sleep(0.5), sys.exit(4)\ntime.sleep(60)"
    failed, _, err = run(program, 2, grace_s=0.3)
    assert failed[0].code == 4 and "rank 0" in err and "still runs: SIGKILL" in err


def test_the_others_may_report_by_themselves(run: Callable[..., Ended]) -> None:
    failed, out, err = run("sys.exit(2) if rank == 0 else (time.sleep(1), print('rank 0 is gone'), sys.exit(75))", 2)
    assert failed[0].code == 2 and out == ["[1] rank 0 is gone"] and "SIGTERM" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    program = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid())); time.sleep(60)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(program=RANK + program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.DEVNULL,
    )
    while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)):
        time.sleep(0.02)
    launcher.send_signal(number)
    assert launcher.wait(10) == (-9 if number == signal.SIGKILL else 128 + number)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    end = time.monotonic() + 3
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def test_children_of_a_rank_go_with_it(run: Callable[..., Ended]) -> None:
    failed, out, _ = run("import subprocess; print(subprocess.Popen(['sleep', '60']).pid)", 1)
    time.sleep(0.1)
    assert failed == [] and not alive(int(out[0].removeprefix("[0] ")))
